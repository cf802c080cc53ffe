"""Calls that flax_mha's own TPU kernel refuses, its reasons, and calls that only it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from flax_mha import dot_product_attention, explain
from flax_mha.kernels.flex import tpu as machine
from flax_mha.masks import Causal, Predicate
from flax_mha.scores import Alibi, Score
from tests.support.arrays import zeros

B, T, S, N, H = 2, 280, 300, 4, 8
Q = zeros((B, T, N, H))


def scored(fn, *args):
    return {"scores": (Score(fn, args),)}


HALVES = np.ones(3, np.float16)
LONG = zeros(300)
REFUSED = {
    "float16": (r"float32 and bfloat16, got float16", {"dtype": "float16"}),
    "no query": (r"no rows, queries or keys", {"t": 0}),
    "no key": (r"no rows, queries or keys", {"s": 0}),
    "no row": (r"no rows, queries or keys", {"batch": 0}),
    "features": (r"at most 128 features, got 136", {"features": 136}),
    "precision": (
        r"precisions default, high and highest, got BF16", {"precision": "BF16_BF16_F32"},
    ),
    "length": (r"at most 20 tiles, T·S = 3000·300 need more", {"t": 3000, "s": 300}),
    "sort": (r"lacks an operation of a mask or a score: sort",
             scored(lambda s, *_: jnp.sort(s))),
    "a product": (r"score: dot_general", scored(lambda s, *_: s @ jnp.eye(s.shape[-1]))),
    "a sum along": (r"score: cumsum", scored(lambda s, *_: s + jnp.cumsum(s, 0))),
    "float16 inside": (r"score: convert_element_type to float16",
                       scored(lambda s, *_: s.astype(jnp.float16).astype(s.dtype))),
    "a large table": (r"score: gather from 300 entries, of more than 256,",
                      scored(lambda s, b, n, i, j, t: s + t[j], LONG)),
    "rows of a table": (r"score: gather",
                        scored(lambda s, b, n, i, j, t: s + t[n].sum(-1), zeros((N, 3)))),
    "a table of three axes": (r"of at most two axes and \d+ entries, got \(2, 2, 2\)",
                              scored(lambda s, *_: s, zeros((2, 2, 2)))),
    "a huge argument": (r"of at most two axes and 131072 entries, got \(512, 512\)",
                        scored(lambda s, *_: s, zeros((512, 512)))),
    "a closure": (r"closes over arrays it can't load: float16\[3\]",
                  scored(lambda s, *_: s + jnp.sum(jnp.asarray(HALVES)).astype(s.dtype))),
    "a loop in a mask": (r"score: scan",
                         {"mask": Predicate(lambda b, n, i, j: jax.lax.map(lambda x: x > 3, j))}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_flex_refuses_with_reason(tpu, monkeypatch, name: str) -> None:
    """Both functions give the same reason, and auto takes another kernel."""
    monkeypatch.setattr(machine, "MACHINE", machine.MACHINE._replace(table=20))
    reason, call = REFUSED[name]
    sizes = {"t": T, "s": S, "batch": B, "features": H, "dtype": "float32"}
    sizes |= {key: call[key] for key in call if key in sizes}
    call = {key: call[key] for key in call if key not in sizes}
    batch, dtype = sizes["batch"], sizes["dtype"]
    q = zeros((batch, sizes["t"], N, sizes["features"]), dtype)
    k = zeros((batch, sizes["s"], N, sizes["features"]), dtype)
    assert explain(q, k, k, **call).chosen != "flex"
    with pytest.raises(ValueError, match=f"can't run this call: .*{reason}"):
        dot_product_attention(q, k, k, kernel="flex", **call)


def test_flex_inside_shard_map_needs_check_vma_false(tpu) -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")

    def call(q):
        return dot_product_attention(q, q, q, mask=Causal(), kernel="flex")

    unchecked = jax.jit(
        jax.shard_map(call, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    )
    np.testing.assert_array_equal(unchecked(Q), 0)
    with pytest.raises(ValueError, match=r"inside jax.shard_map it needs check_vma=False"):
        jax.jit(jax.shard_map(call, mesh=mesh, in_specs=rows, out_specs=rows))(Q)


def test_flex_on_mesh_without_rules_refuses(tpu, monkeypatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        refused = explain(*(jax.ShapeDtypeStruct(Q.shape, Q.dtype),) * 3).refused
    with pytest.raises(ValueError, match=r"no rule uses"):
        raise ValueError(refused["flex"])


def test_auto_takes_flex_for_all_that_it_runs(tpu) -> None:
    x = jax.ShapeDtypeStruct((2, 4096, 4, 64), jnp.bfloat16)
    assert explain(x, x, x, mask=Causal()).chosen == "flex"
    assert explain(x, x, x, mask=Causal(), scores=(Alibi(),)).chosen == "flex"
    assert explain(x, x, x, mask=Causal(), precision="BF16_BF16_F32").chosen == "blockwise"
    small = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    assert explain(small, small, small, scores=(Alibi(),)).chosen == "short"


def test_flex_refuses_other_platforms(monkeypatch) -> None:
    for platform, rule in (("cpu", "TPU and NVIDIA GPUs"), ("gpu", "NVIDIA GPUs")):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        with pytest.raises(ValueError, match=f"(runs on {rule} only, this is cpu|needs JAX 0.12)"):
            dot_product_attention(Q, Q, Q, kernel="flex")
