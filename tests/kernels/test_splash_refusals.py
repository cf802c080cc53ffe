"""Calls that the splash kernel refuses, its reasons, and the choice of auto."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from flax_mha import dot_product_attention, explain, sharding
from flax_mha.masks import (
    Causal,
    Dense,
    Lengths,
    PerHead,
    Predicate,
    Segments,
    Window,
)
from flax_mha.scores import SoftCap
from tests.kernels.oracle_check import B, H, N
from tests.repository.test_kernel_table import traced
from tests.support.arrays import zeros

T, S = 280, 300
PACKED = Segments(zeros((B, T), int), zeros((B, S), int))
TABLE = Dense(np.kron(np.eye(28, 30), np.ones((10, 10))) > 0)
Q = zeros((B, T, N, H))
TRACED = zeros((T, S), bool)


class Reversed(Segments):
    """A subclass with another meaning."""

    def allowed(self, at):
        return ~super().allowed(at)


class Doubled(SoftCap):
    """A subclass with another meaning."""


REFUSED = {
    "a subclass of Segments": (r"Reversed holds arrays",
                               {"mask": Reversed(np.zeros(T, int), PACKED.kv)}),
    "a subclass of SoftCap": (r"one SoftCap only, got Doubled", {"scores": (Doubled(2.0),)}),
    "float16": (r"float32 and bfloat16, got float16", {"dtype": "float16"}),
    "no query": (r"no rows, queries or keys", {"t": 0}),
    "features": (r"at most 128 features, got 136", {"features": 136}),
    "dropout": (r"no dropout", {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}),
    "precision": (r"no precision setting, got highest", {"precision": "highest"}),
    "bias": (r"one SoftCap only, got SoftCap, Bias",
             {"scores": (SoftCap(2.0),), "bias": zeros(S)}),
    "traced table": (r"Dense holds arrays that are not NumPy's", {"mask": TRACED}),
    "lengths per query": (r"Lengths holds arrays",
                          {"mask": Lengths(zeros((B, T), int)) & Causal()}),
    "segments joined by |": (r"Or holds arrays", {"mask": Causal() | PACKED}),
    "by row": (r"one mask .*, got Predicate", {"mask": Predicate(lambda b, n, i, j: j <= i + b)}),
    "per head": (r"one mask .*, got PerHead", {"mask": PerHead([Causal(), Window(1)] * 2)}),
    "table": (r"Dense holds arrays, which the kernel can't load", {"mask": TABLE}),
    "two kinds of segments": (r"ids from one mask, got Segments, Segments",
                              {"mask": PACKED & PACKED}),
    "segments and lengths": (r"ids from one mask, got Segments, Lengths",
                             {"mask": PACKED & Lengths(zeros(B, int))}),
    "sinks": (r"has no sinks", {"sinks": zeros(N)}),
    "lse": (r"returns no lse", {"return_residuals": True}),
    "keys in any order": (r"kv_positions do not count up",
                          {"mask": Causal(), "kv_positions": np.arange(S)[::-1]}),
    "traced positions": (r"q_positions are not NumPy's",
                         {"mask": Causal(), "q_positions": jnp.arange(T)}),
    "positions by row": (r"kv_positions differ between rows",
                         {"mask": Causal(), "kv_positions": np.zeros((B, S), int)}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_splash_refuses_with_reason(tpu, name: str) -> None:
    """Both functions give the same reason, and auto takes another kernel.

    Arrays of JAX are traced.
    """
    reason, call = REFUSED[name]
    sizes = {"t": T, "s": S, "batch": B, "features": H, "dtype": "float32"}
    sizes |= {key: call[key] for key in call if key in sizes}
    call = {key: call[key] for key in call if key not in sizes}
    batch, dtype = sizes["batch"], sizes["dtype"]
    q = zeros((batch, sizes["t"], N, sizes["features"]), dtype)
    k = zeros((batch, sizes["s"], N, sizes["features"]), dtype)
    explanation = traced(functools.partial(explain, q, k, k), call)
    assert explanation.chosen != "splash"
    with pytest.raises(ValueError, match=f"can't run this call: .*{reason}"):
        traced(functools.partial(dot_product_attention, q, k, k, kernel="splash"), call)


def test_splash_inside_shard_map_needs_check_vma_false(tpu) -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")

    def call(q):
        return dot_product_attention(q, q, q, mask=Causal(), kernel="splash")

    unchecked = jax.jit(
        jax.shard_map(call, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    )
    np.testing.assert_array_equal(unchecked(Q), 0)
    with pytest.raises(ValueError, match=r"inside jax.shard_map it needs check_vma=False"):
        jax.jit(jax.shard_map(call, mesh=mesh, in_specs=rows, out_specs=rows))(Q)


def test_splash_refuses_several_devices_without_a_mesh(tpu, monkeypatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    with pytest.raises(ValueError, match=r"between the 8 devices by itself; wrap in `with jax.set"):
        dot_product_attention(Q, Q, Q, mask=Causal(), kernel="splash")


@pytest.mark.parametrize(
    "mask",
    [
        PerHead([Causal(), Window(1)] * 2),
        Predicate(lambda b, n, i, j: j <= i + n),
        Predicate(lambda b, n, i, j: j <= i + b),
    ],
    ids=["per head", "by head", "by row"],
)
def test_splash_refuses_masks_that_differ_between_devices(tpu, mask) -> None:
    """A device has one row and one head, with the same mask as far as it sees."""
    mesh = jax.make_mesh((B, N), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
        assert (
            "takes one mask for all rows and heads" in explain(Q, Q, Q, mask=mask).refused["splash"]
        )
        assert "splash" not in explain(Q, Q, Q, mask=Causal()).refused
