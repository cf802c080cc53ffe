"""The numbers of flax_mha's own TPU kernels in Pallas' interpret modes."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from flax_mha import dot_product_attention, sharding
from flax_mha.base.shapes import Dims
from flax_mha.kernels import bind_call
from flax_mha.kernels.chips import tpus as blocks
from flax_mha.kernels.flex import short
from flax_mha.kernels.flex import tpu as machine
from flax_mha.kernels.flex.traced import divide
from flax_mha.masks import Causal, Lengths, PerHead, Predicate, Segments, Window
from flax_mha.scores import Alibi, RelativeBias, Score, SoftCap
from tests.kernels.problems import SINKS
from tests.support import oracle

B, T, S, N, K, H = 2, 130, 200, 4, 2, 8
RNG = np.random.default_rng(3)
IDS = np.sort(RNG.integers(0, 3, (B, S)))
PACKED = Causal() & Segments(jnp.asarray(IDS[:, :T]), jnp.asarray(IDS))
DROPOUT = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(7)}


def arrays(dtype: str = "float32", b: int = B) -> list[jax.Array]:
    """Return q, k, v and a cotangent."""
    rng = np.random.default_rng(1)
    sizes = [(T, N, H), (S, K, H), (S, K, 5), (T, N, 5)]
    return [jnp.asarray(rng.normal(size=(b, *size)), dtype) for size in sizes]


TABLE = np.array([0.5, -1.0, 2.0, 0.0, 1.0], np.float32)


def user_score(s, row, head, i, j, w, x, t):
    """Look up arrays by head, by distance, by both, in a closure, and at a constant index."""
    near = jnp.clip(j - i, -2, 2) + 2
    s = s * (1 + w * jnp.cos((i - j + head + row).astype(s.dtype))) + x[head] * t[0, 1]
    return s + t[head, near] + jnp.asarray(TABLE)[near] + jnp.take(x, jnp.clip(i, 0, 3))


def learned(*names: str) -> dict[str, jax.Array]:
    rng = np.random.default_rng(2)
    shapes = {
        "slopes": (N,), "table": (N, 8), "bias": (T, S), "w": (), "x": (N,), "t": (N, 5),
        "bias of queries": (B, 1, T, 1), "bias of keys": (N, 1, S),
    }  # fmt: skip
    values = {name: jnp.asarray(rng.normal(size=shapes[name]), jnp.float32) for name in shapes}
    values["sinks"] = jnp.asarray(SINKS)
    return {name: values[name] for name in names}


# Each call as a function of learned arrays, and their names.
CALLS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "everything": (
        lambda x: {
            "mask": PACKED, "bias": x["bias"], "sinks": x["sinks"],
            "scores": (SoftCap(1.5), Alibi(x["slopes"]), RelativeBias(x["table"])), **DROPOUT,
        },
        ("slopes", "table", "bias", "sinks"),
    ),
    "user_score": (
        lambda x: {
            "mask": Predicate(lambda b, n, i, j, m: (i + j) % m != b, (np.array(3),)) & Causal(),
            "scores": (Score(user_score, (x["w"], x["x"], x["t"])),),
        },
        ("w", "x", "t"),
    ),
    "of queries": (lambda x: {"bias": x["bias of queries"]}, ("bias of queries",)),
    "of keys": (
        lambda x: {
            "bias": x["bias of keys"],
            "mask": PerHead([Causal(), Window(4, 4), ~Causal(), Causal()]),
        },
        ("bias of keys",),
    ),
}  # fmt: skip


def pulled(kernel: str, call: Any, operands: Any, x: Any, jit: Any = jax.jit) -> Any:
    """Compute out, lse and all gradients of call(x)."""
    *qkv, cotangent = operands

    @jit
    def both(qkv, x):
        def attend(qkv, x):
            out, lse = dot_product_attention(*qkv, kernel=kernel, return_residuals=True, **call(x))
            return out, jnp.where(jnp.isfinite(lse), lse, 0.0)

        results, pull = jax.vjp(attend, qkv, x)
        return results, pull((cotangent, jnp.sin(results[1])))

    return both(qkv, x)


def close(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        assert oracle.error(a, b) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["flex", "short"])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_learned_arrays_match_reference(tpu, name: str, kernel: str) -> None:
    call, names = CALLS[name]
    args = call, arrays(), learned(*names)
    close(pulled(kernel, *args), pulled("reference", *args))


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_some_heads_at_a_step_match_reference(tpu, monkeypatch, name: str) -> None:
    """Arrays that all heads share are summed over the steps."""
    monkeypatch.setattr(short, "_heads", lambda dims, scores, most: 1)
    call, names = CALLS[name]
    args = call, arrays(), learned(*names)
    close(pulled("short", *args), pulled("reference", *args))


def test_blocks_follow_the_chip_and_the_mask() -> None:
    def sizes(device: str, T: int, mask: Any, H: int = 128) -> tuple[int, int]:
        x = jnp.zeros((1, T, 1, H), jnp.bfloat16)
        *qkv, spec = bind_call(x, x, x, mask=mask)
        plan, _ = divide(spec, Dims.of(*qkv), machine.MACHINE, device)
        return plan.block_q, plan.block_k

    assert sizes("TPU v6 lite", 8192, Causal()) == (1024, 1024)
    assert sizes("TPU v6 lite", 8192, Window(1024, 0)) == (512, 512)
    found = []
    jax.make_jaxpr(lambda n: found.append(sizes("TPU v6 lite", 8192, Lengths(n))))(jnp.array([9]))
    assert found == [(512, 512)]
    assert sizes("TPU v5 lite", 8192, Causal()) == (512, 512)
    assert sizes("TPU v4", 8192, Causal(), 256) == (256, 256)
    assert sizes("TPU v6 lite", 8192, Causal(), 512) == (256, 256)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_stretches_of_keys_match_reference(tpu, monkeypatch, name: str) -> None:
    """In a memory that holds the gradients of one block of keys of two."""
    monkeypatch.setattr(blocks, "memory", lambda device: 2**20)
    call, names = CALLS[name]
    args = call, arrays(), learned(*names)
    close(pulled("flex", *args), pulled("reference", *args))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["flex", "short"])
@pytest.mark.parametrize("name", ["everything", "user_score", "of keys"])
def test_no_memory_is_read_before_it_is_written(tpu_memory, name: str, kernel: str) -> None:
    """With races detected. One row, because it is slow."""
    call, names = CALLS[name]

    def one(x):
        given = call(x)
        first = Segments(jnp.asarray(IDS[:1, :T]), jnp.asarray(IDS[:1]))
        return given | ({"mask": Causal() & first} if given.get("mask") is PACKED else {})

    args = one, arrays(b=1), learned(*names)
    close(pulled(kernel, *args), pulled("reference", *args))


@pytest.mark.slow
def test_bias_gradient_of_masked_pairs_is_zero(tpu) -> None:
    """In skipped tiles too."""
    call = lambda x: {"mask": Causal(), "bias": x["bias"]}  # noqa: E731
    _, (_, grads) = pulled("flex", call, arrays(), learned("bias"))
    unseen = np.arange(S) > np.arange(T)[:, None]
    np.testing.assert_array_equal(grads["bias"][unseen], 0)
    assert (grads["bias"][~unseen] != 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["flex", "short"])
@pytest.mark.parametrize("name", ["everything", "user_score"])
def test_mesh_matches_one_device(tpu, name: str, kernel: str) -> None:
    """Dropout follows the global row and head."""
    call, names = CALLS[name]
    args = call, arrays(), learned(*names)
    expected = pulled("reference", *args)
    kind = AxisType.Explicit if name == "user_score" else AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
        close(pulled(kernel, *args), expected)


@pytest.mark.slow
def test_large_tile_tables_are_merged(tpu, monkeypatch) -> None:
    """Into one table for all heads and rows."""
    monkeypatch.setattr(machine, "MACHINE", machine.MACHINE._replace(table=4))
    mask = PerHead([Causal(), Window(4, 4), ~Causal(), Causal()]) & PACKED
    args = (lambda x: {"mask": mask}), arrays(), {}
    close(pulled("flex", *args), pulled("reference", *args))
