"""The numbers of flax_mha's own TPU kernels in Pallas' interpret modes."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import dot_product_attention
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
from tests.support.meshes import on

B, T, S, N, K, H = 2, 130, 200, 4, 2, 8
RNG = np.random.default_rng(3)
IDS = np.sort(RNG.integers(0, 3, (B, S)))
PACKED = Causal() & Segments(jnp.asarray(IDS[:, :T]), jnp.asarray(IDS))
DROPOUT = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(7)}


def arrays() -> list[jax.Array]:
    """Return q, k, v and a cotangent."""
    rng = np.random.default_rng(1)
    sizes = [(T, N, H), (S, K, H), (S, K, 5), (T, N, 5)]
    return [jnp.asarray(rng.normal(size=(B, *size)), jnp.float32) for size in sizes]


TABLE = np.array([0.5, -1.0, 2.0, 0.0, 1.0], np.float32)


def user_score(s, row, head, i, j, w, x, t):
    """Look up arrays by head, query, key and distance, in a closure, and at constant indices.

    Use branches, nested functions, and functions with derivatives of their own.
    """
    near = jnp.clip(j - i, -2, 2) + 2
    s = s * (1 + w * jnp.cos((i - j + head + row).astype(s.dtype))) + x[head] * t[0, 1]
    s = s + t[head, near] + jnp.asarray(TABLE)[near] + jnp.take(x, i, mode="clip") + t[:, 3][head]
    s = s + TABLE[1] * jnp.take(x, j, mode="fill", fill_value=0.5)
    s = jax.lax.switch((w < 9).astype(jnp.int32), [jnp.sin, lambda s: w * s + x[1], jnp.cos], s)
    return jax.checkpoint(jnp.tanh)(s) + jax.nn.relu(s) + x[2] * jax.nn.silu(s)


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


def pulled(kernel: str, call: Any, operands: Any, x: Any) -> Any:
    """Compute out, lse and all gradients of call(x), in float32 with `reference`."""
    if kernel == "reference":
        operands = [y.astype(jnp.float32) for y in operands]
    *qkv, cotangent = operands

    @jax.jit
    def both(qkv, x):
        def attend(qkv, x):
            out, lse = dot_product_attention(*qkv, kernel=kernel, return_residuals=True, **call(x))
            return out, jnp.where(jnp.isfinite(lse), lse, 0.0)

        results, pull = jax.vjp(attend, qkv, x)
        return results, pull((cotangent, jnp.sin(results[1])))

    return both(qkv, x)


def close(got: Any, want: Any, bound: float = 1e-5) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        assert oracle.error(a, b) < bound


# How the kernels run. "stretches of keys": memory fits the gradients of one of two blocks of keys.
SETTINGS = {
    "usual": ("flex", "short"), "one head at a step": ("short",), "stretches of keys": ("flex",),
    "mesh": ("flex", "short"), "races detected": ("flex", "short"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("setting", "kernel"), [(x, y) for x in SETTINGS for y in SETTINGS[x]])
def test_gradients_of_learned_arrays_match_reference(
    name: str, setting: str, kernel: str, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """No memory is read before it is written. Dropout follows the global row and head."""
    request.getfixturevalue("tpu_memory" if setting == "races detected" else "tpu")
    if setting == "one head at a step":
        monkeypatch.setattr(short, "_heads", lambda dims, scores, most: 1)
    if setting == "stretches of keys":
        monkeypatch.setattr(blocks, "memory", lambda device: 2**20)
    call, names = CALLS[name]
    args = call, arrays(), learned(*names)
    wanted = pulled("reference", *args)
    kind = "Explicit" if name == "user_score" else "Auto"
    with on(kind, shape=(2, 2)) if setting == "mesh" else contextlib.nullcontext():
        found = pulled(kernel, *args)
    close(found, wanted)
    if name == "everything":
        hidden = ~np.asarray(PACKED.dense(T, S, (B,))).any((0, 1))
        np.testing.assert_array_equal(np.asarray(found[1][1]["bias"])[hidden], 0)


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
def test_large_tile_tables_are_merged(tpu, monkeypatch) -> None:
    """Into one table for all heads and rows."""
    monkeypatch.setattr(machine, "MACHINE", machine.MACHINE._replace(table=4))
    mask = PerHead([Causal(), Window(4, 4), ~Causal(), Causal()]) & PACKED
    args = (lambda x: {"mask": mask}), arrays(), {}
    close(pulled("flex", *args), pulled("reference", *args))
