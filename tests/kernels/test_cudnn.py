"""The numbers of the kernel for NVIDIA GPUs, with a model in place of cuDNN."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import KVCache, dot_product_attention
from flax_mha.kernels.cudnn import primitives
from flax_mha.masks import (
    Causal,
    Lengths,
    Mask,
    PerHead,
    Predicate,
    Prefix,
    Segments,
    Window,
    as_mask,
)
from tests.kernels import cudnn_model
from tests.kernels.cases import pairs
from tests.kernels.half_precision import close, run
from tests.kernels.oracle_check import HV, B, H, N, arrays, check, table
from tests.support import oracle
from tests.support.meshes import KINDS, on

T, S = 40, 64
MASKS: dict[str, Mask | None] = {
    "none": None,
    "all": Window() & Prefix(S) & np.ones((T, S), bool),
    "causal": Causal(),
    "window": Window(7, 0),
    "causal window": Causal() & Window(9, 4) & Window(left=20),
    "itself": Window(0, 0),
    "lengths": Lengths(jnp.array([13, 0])),
    "beyond": Lengths(jnp.array([100, -3])),
    "lengths of queries": Lengths(jnp.array([13, 64]), jnp.array([40, 5])) & Causal(),
    "several lengths": Lengths(np.array([50, 20])) & Lengths(np.array([13, 64])),
    # The window leaves the row's keys behind: queries from 17 on are fully masked.
    "empty windows": Lengths(jnp.array([10, 64])) & Window(7, 0),
    "heads alike": PerHead([Window(left=T), Prefix(S), Window(), Prefix(S)]) & Causal(),
}


class Later(Causal):
    """A subclass with another meaning."""

    def allowed(self, at):
        return at.k >= at.q


TABLES = np.random.default_rng(5).random((B, 1, T, S)) < 0.5
# A bias hides pairs within cuDNN's band. The fourth query of the arrays sees nothing.
HIDDEN: dict[str, Mask] = {
    "array": as_mask(TABLES & (np.arange(T) != 3)[:, None]),
    "traced array": Causal() & jnp.asarray(TABLES[0, 0] & (np.arange(T) != 3)[:, None]),
    "keys": as_mask(TABLES[:, :, :1]),
    "prefix": Prefix(9) & Lengths(jnp.array([50, 20])),
    "predicate": Predicate(lambda row, head, i, j: (row + head + i + j) % 3 < 2),
    "per head": PerHead([Causal(), Window(3, 3), Prefix(5), Window(0, 0)]),
    "or": Causal() | Lengths(jnp.array([13, 0])),
    "not": ~Causal(),
    "lengths of each query": Lengths(np.arange(B * T).reshape(B, T) % 50),
    "windows ahead": Window(2, 3),
    "segments": Causal() & Segments(np.arange(T) % 3, np.arange(S) % 3),
    "subclass": Later(),
}


# Positions of queries and keys, and a mask.
POSITIONS: dict[str, tuple[Any, Any, Mask | None]] = {
    "equal": (9, 9, Causal() & Window(8) & Lengths(np.array([40, 12]))),
    "numbers": (30, 30 + np.arange(S), Causal() & Lengths(np.array([50, 0]), np.array([60, 33]))),
    "every key is behind": (S, None, Causal()),
    "every key is near": (20, None, Window(S, S)),
    "traced, not asked": (jnp.arange(T), jnp.arange(S), None),
    "traced, of queries": (jnp.arange(T), None, Lengths(jnp.array([13, 0]))),
    "traced": (jnp.arange(T) * 2, jnp.arange(S), Causal() & Window(9)),
    "aligned ends": (S - T, None, Causal()),
    "behind": (0, 3 + np.arange(S), Causal()),
    "backwards": (None, np.arange(S)[::-1], Lengths(np.array([50, 1]))),
}
# The axes of a bias before queries and keys, or no bias.
BIASES = {"no bias": None, "[]": (), "[N]": (N,), "[B, 1]": (B, 1), "[B, N]": (B, N)}


def compare(
    mask: Mask | None, bias: tuple[int, ...] | None, sunk: bool, K: int,
    sizes: tuple[int, int] = (T, S), **positions: Any,
) -> None:  # fmt: skip
    """Compare a call with the oracle, with the gradients of its bias and sinks."""
    rng, learned = np.random.default_rng(0), {}
    if bias is not None:
        # Some values are −∞, and query 3 is fully masked.
        values = rng.normal(size=(*bias, *sizes))
        hidden = (values < -1) | (np.arange(sizes[0])[:, None] == 3)
        learned["bias"] = jnp.asarray(np.where(hidden, -np.inf, values), jnp.bfloat16)
    if sunk:
        learned["sinks"] = np.float32([-100, -1, 0.5, 90])
    known = {"allowed": table(mask, *sizes, **positions), "scale": 0.7} | learned
    call = {"mask": mask, "scale": 0.7} | positions
    check(arrays(*sizes, K, "bfloat16"), known, call, learned)


@pytest.mark.sampled(0.021)
@pytest.mark.parametrize(
    ("mask", "bias", "sunk", "K"),
    pairs(mask=[*MASKS], bias=[*BIASES], sunk=[False, True], K=[1, 2, 4]),
)
def test_cudnn_matches_oracle(nvidia, mask: str, bias: str, sunk: bool, K: int) -> None:
    compare(MASKS[mask], BIASES[bias], sunk, K)


def test_cudnn_shifts_windows_with_the_positions(nvidia) -> None:
    compare(Window(8, 3), None, False, 2, q_positions=5, kv_positions=8)


@pytest.mark.sampled(0.018)
@pytest.mark.parametrize(("mask", "bias", "K"), pairs(mask=[*HIDDEN], bias=[*BIASES], K=[2, 4]))
def test_cudnn_hides_pairs_by_a_bias(nvidia, mask: str, bias: str, K: int) -> None:
    """A user's bias has its gradient."""
    compare(HIDDEN[mask], BIASES[bias], False, K)


@pytest.mark.sampled(0.12)
@pytest.mark.parametrize("name", POSITIONS)
def test_cudnn_positions_match_oracle(nvidia, name: str) -> None:
    q, k, mask = POSITIONS[name]
    compare(mask, None, False, 2, q_positions=q, kv_positions=k)


@pytest.mark.sampled(0.06)
@pytest.mark.parametrize("sizes", [(7, 9), (8, 9), (33, 128), (33, 129), (1, 65), (65, 1)])
@pytest.mark.parametrize("bias", [None, (N,)])
def test_cudnn_pads_odd_numbers_of_tokens(nvidia, sizes: tuple[int, int], bias: Any) -> None:
    compare(Prefix(2) & Lengths(jnp.array([sizes[1], sizes[1] // 2])), bias, True, 2, sizes)


IDS = jnp.asarray(np.repeat(np.arange(5), [13, 1, 20, 4, 2])[None].repeat(B, 0))


@pytest.mark.sampled(0)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("mask", "bias"),
    [
        (None, None),
        (None, ()),
        (MASKS["lengths of queries"], (B, N)),
        # Documents are sharded with their rows.
        (Causal() & Segments(IDS, runs=True, at_most=5), None),
    ],
    ids=["plain", "bias", "lengths", "packed"],
)
def test_cudnn_on_mesh_matches_one_device(
    nvidia, mask: Mask | None, bias: tuple[int, ...] | None, kind: str
) -> None:
    """Rows over one axis, heads over another."""
    qkv, rng = arrays(T, T, 4, "bfloat16")[:3], np.random.default_rng(4)
    bias = None if bias is None else jnp.asarray(rng.normal(size=(*bias, T, T)), jnp.bfloat16)

    def both(qkv, bias):
        def loss(qkv, bias):
            out, lse = run(*qkv, mask=mask, bias=bias)
            lse = jnp.where(jnp.isfinite(lse), lse, 0.0)
            return (out.astype(jnp.float32) ** 2).sum() + lse.sum()

        return jax.value_and_grad(loss, 0 if bias is None else (0, 1))(qkv, bias)

    expected = jax.jit(both)(qkv, bias)
    with on(kind, shape=(2, 2)):
        got = jax.jit(lambda *args: both(*args))(qkv, bias)
    jax.tree.map(close, got, expected)


def test_hidden_pairs_are_no_constant_of_the_program(nvidia) -> None:
    """A table of them would take time to trace and memory to hold, 1 GiB for 2^15 tokens."""
    x = jax.ShapeDtypeStruct((1, 512, 2, 8), jnp.bfloat16)
    text = jax.jit(lambda q, k, v: run(q, k, v, mask=Causal() | Prefix(9))).lower(x, x, x).as_text()
    assert len(text) < 512 * 512 / 4


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize(("t", "K"), [(1, 4), (7, 2), (40, 2)])
def test_cudnn_reads_a_cache_where_it_is(nvidia, monkeypatch, t: int, K: int) -> None:
    """The slots after a row's tokens hold any number. Gradients are those of `reference`."""
    layouts = []

    def recorded(*args, layout, **kwargs):
        layouts.append(layout)
        return cudnn_model.forward(*args, layout=layout, **kwargs)

    monkeypatch.setattr(primitives, "_dot_product_attention_fwd_impl", recorded)
    q, k, v, cotangent = arrays(T, S, K, "bfloat16")
    q, cotangent = q[:, :t], cotangent[:, :t]
    cache = KVCache.empty((B,), S, K, H, HV, dtype=jnp.bfloat16)
    cache = cache.append(k[:, :24], v[:, :24], jnp.array([24, 9]))
    cache = cache.replace(key=cache.key.at[..., 24:, :].set(1e5))
    new = k[:, :t], v[:, :t]

    @functools.partial(jax.jit, static_argnums=0)
    def both(kernel, q, *new):
        def extend(q, *new):
            return cache.extend(q, *new, kernel=kernel)[0]

        out, pull = jax.vjp(jax.checkpoint(extend), q, *new)
        mapped = jax.vmap(extend)(*(jnp.stack([x, 2 * x]) for x in (q, *new)))
        return out, mapped, *pull(cotangent.astype(out.dtype))

    for got, want in zip(both("cudnn", q, *new), both("reference", q, *new), strict=True):
        close(got, want)
    assert {*layouts} == {primitives.AttentionLayout.BNTH.value}


@pytest.mark.sampled(0.12)
@pytest.mark.parametrize(
    ("causal", "lengths", "window"),
    [(False, False, None), (True, True, None), (False, True, None), (True, False, (6, 0))],
)
def test_cudnn_model_matches_jax_nn(causal: bool, lengths: bool, window) -> None:
    """It shows that the native arguments for cuDNN are the ones that `jax.nn` would pass."""
    q, k, v, _ = arrays(T, S, 2, "bfloat16")
    v = jnp.pad(v, ((0, 0),) * 3 + ((0, H - HV),))
    q_length, k_length = jnp.array([40, 11]), jnp.array([64, 23])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        want = jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, local_window_size=window, implementation="xla",
            **{"query_seq_lengths": q_length, "key_value_seq_lengths": k_length} if lengths else {},
        )  # fmt: skip
    full = jnp.array([T, T]), jnp.array([S, S])
    kind = primitives.CudnnCall(H**-0.5, causal, None if window is None else window[0], False)
    unused = jnp.zeros(0, q.dtype)
    got, _ = cudnn_model.forward(
        q, k, v, unused, *((q_length, k_length) if lengths else full), *(unused,) * 4,
        **kind.settings(False), is_training=True,
    )  # fmt: skip
    real = np.arange(T) < np.asarray(q_length if lengths else full[0])[:, None]
    close(got[real], want[real], 1e-2)


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("kernel", ["reference", "blockwise", "cudnn"])
def test_gradient_of_the_scale_is_that_of_float32(
    nvidia: None, rng: np.random.Generator, kernel: Any
) -> None:
    q, k, v = (jnp.asarray(rng.normal(size=(2, 256, 2, 16)), jnp.bfloat16) for _ in range(3))

    def loss(scale: jax.Array, kernel: Any, dtype: Any) -> jax.Array:
        out = dot_product_attention(
            *(x.astype(dtype) for x in (q, k, v)), mask=Causal(), scale=scale, kernel=kernel
        )
        return jnp.sin(out.astype(jnp.float32)).sum()

    gradient = jax.jit(jax.grad(loss), static_argnums=(1, 2))
    expected = gradient(jnp.float32(0.3), "reference", "float32")
    assert oracle.error(gradient(jnp.float32(0.3), kernel, "bfloat16"), expected) < 0.03
