"""The numbers of the kernel for NVIDIA GPUs, with a model in place of cuDNN."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import KVCache, dot_product_attention
from flax_mha.base.coordinates import whole
from flax_mha.base.shapes import Dims
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

T, S, BOTH = 40, 64, (False, True)
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


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize(("mask", "biased", "K"), pairs(mask=[*HIDDEN], biased=BOTH, K=[2, 4]))
def test_cudnn_hides_pairs_by_a_bias(nvidia, mask: str, biased: bool, K: int) -> None:
    """A user's bias has its gradient."""
    learned = {}
    if biased:
        bias = np.random.default_rng(0).normal(size=(N, T, S))
        learned = {"bias": jnp.asarray(np.where(bias < -1, -np.inf, bias), jnp.bfloat16)}
    known = {"allowed": table(HIDDEN[mask], T, S)} | learned
    call = lambda learned: {"mask": HIDDEN[mask]} | learned  # noqa: E731
    check("cudnn", arrays(T, S, K, "bfloat16"), known, call, learned)


def test_hidden_pairs_are_no_constant_of_the_program(nvidia) -> None:
    """A table of them would take time to trace and memory to hold, 1 GiB for 2^15 tokens."""
    x = jax.ShapeDtypeStruct((1, 512, 2, 8), jnp.bfloat16)
    text = jax.jit(lambda q, k, v: run(q, k, v, mask=Causal() | Prefix(9))).lower(x, x, x).as_text()
    assert len(text) < 512 * 512 / 4


@pytest.mark.sampled(0.1, slow=0.2)
@pytest.mark.parametrize(
    ("sizes", "sunk"),
    [((7, 9), False), ((8, 9), False), ((33, 128), True), ((33, 129), True)],
)
@pytest.mark.parametrize("biased", BOTH)
def test_cudnn_pads_odd_numbers_of_tokens(nvidia, sizes, sunk: bool, biased: bool) -> None:
    t, s = sizes
    mask = Prefix(2) & Lengths(jnp.array([s, s // 2]))
    learned = {"bias": jnp.asarray(np.random.default_rng(0).normal(size=(N, t, s)), jnp.bfloat16)}
    learned = learned if biased else {}
    learned |= {"sinks": jnp.array([-1.0, 0.0, 0.5, 2.0])} if sunk else {}
    known = {"allowed": table(mask, t, s)} | learned
    call = lambda learned: {"mask": mask} | learned  # noqa: E731
    check("cudnn", arrays(t, s, 2, "bfloat16"), known, call, learned)


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize(
    ("mask", "K", "dtype"),
    [(mask, 2, "bfloat16") for mask in MASKS]
    + [(mask, K, "float16") for mask in ("none", "lengths of queries") for K in (1, 2, 4)],
)
def test_cudnn_masks_match_oracle(nvidia, mask: str, K: int, dtype: str) -> None:
    known = {"allowed": table(MASKS[mask], T, S)}
    check("cudnn", arrays(T, S, K, dtype), known, lambda _: {"mask": MASKS[mask]}, {})


@pytest.mark.sampled(0.07)
@pytest.mark.parametrize("mask", ["none", "causal window", "empty windows"])
@pytest.mark.parametrize("shape", [(T, S), (N, T, S), (B, 1, T, S), (B, N, T, S)], ids=str)
def test_cudnn_bias_matches_oracle(nvidia, mask: str, shape: tuple[int, ...]) -> None:
    """With gradients, and biases of −∞ that fully mask some queries."""
    rng = np.random.default_rng(0)
    bias = rng.normal(size=shape)
    bias = np.where((rng.random(shape) < 0.2) | (np.arange(T)[:, None] == 3), -np.inf, bias)
    bias = jnp.asarray(bias, jnp.bfloat16)
    known = {"allowed": table(MASKS[mask], T, S), "bias": bias}
    call = lambda learned: {"mask": MASKS[mask], "bias": learned["bias"]}  # noqa: E731
    check("cudnn", arrays(T, S, 2, "bfloat16"), known, call, {"bias": bias})


@pytest.mark.slow
@pytest.mark.parametrize(("t", "s"), [(1, 2), (2, 1), (1, 65), (65, 1), (33, 129), (130, 7)])
def test_cudnn_sizes_match_oracle(nvidia, t: int, s: int) -> None:
    for mask in (Causal(), Window(5, 0), None):
        known, call = {"allowed": table(mask, t, s)}, {"mask": mask}
        check("cudnn", arrays(t, s, 2, "bfloat16"), known, lambda _, call=call: call, {})


# All pairs of these occur, not their whole product; so below.
@pytest.mark.sampled(0.1)
@pytest.mark.parametrize(
    ("mask", "biased", "K"),
    pairs(mask=["none", "window", "lengths of queries", "empty windows"], biased=BOTH, K=[2, 4]),
)
def test_cudnn_sinks_match_oracle(nvidia, mask: str, biased: bool, K: int) -> None:
    """Their share of the output, the lse with them, and their gradients."""
    learned = {"sinks": jnp.array([-100.0, -1.0, 0.5, 90.0])}
    if biased:
        rng = np.random.default_rng(0)
        bias = np.where(rng.random((N, T, S)) < 0.2, -np.inf, rng.normal(size=(N, T, S)))
        learned["bias"] = jnp.asarray(bias, jnp.bfloat16)
    known = {"allowed": table(MASKS[mask], T, S)} | learned
    call = lambda learned: {"mask": MASKS[mask]} | learned  # noqa: E731
    check("cudnn", arrays(T, S, K, "bfloat16"), known, call, learned)


POSITIONS = {
    "equal": (9, 9, Causal() & Window(8) & Lengths(np.array([40, 12]))),
    "numbers": (30, 30 + np.arange(S), Causal() & Lengths(np.array([50, 0]), np.array([60, 33]))),
    "every key is behind": (S, None, Causal()),
    "every key is near": (20, None, Window(S, S)),
    "shifted windows": (5, 8, Window(8, 3)),
    "traced, not asked": (jnp.arange(T), jnp.arange(S), None),
    "traced, of queries": (jnp.arange(T), None, Lengths(jnp.array([13, 0]))),
    "traced": (jnp.arange(T) * 2, jnp.arange(S), Causal() & Window(9)),
    "aligned ends": (S - T, None, Causal()),
    "behind": (0, 3 + np.arange(S), Causal()),
    "backwards": (None, np.arange(S)[::-1], Lengths(np.array([50, 1]))),
}


@pytest.mark.sampled(0.27)
@pytest.mark.parametrize("name", POSITIONS)
def test_cudnn_positions_match_oracle(nvidia, name: str) -> None:
    q, k, mask = POSITIONS[name]
    call = {"q_positions": q, "kv_positions": k, "mask": mask, "scale": 0.7}
    allowed = None
    if mask is not None:
        q, k = (
            np.arange(L) + (0 if x is None else x) if x is None or isinstance(x, int) else x
            for x, L in ((q, T), (k, S))
        )
        dims = Dims((B,), T, S, N, 2, H, HV)
        allowed = np.asarray(mask.bind(dims).allowed(whole(dims, q, k)))
    known = {"allowed": allowed, "scale": 0.7}
    check("cudnn", arrays(T, S, 2, "bfloat16"), known, lambda _: call, {})


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize(
    ("mask", "biased", "sunk", "with_out"),
    pairs(mask=["none", "causal window", "empty windows"], biased=BOTH, sunk=BOTH, with_out=BOTH),
)
def test_cotangents_of_the_lse(nvidia, mask: str, biased: bool, sunk: bool, with_out: bool) -> None:
    """Alone, and together with the output's."""
    *qkv, cotangent = arrays(T, S, 2, "bfloat16")
    rng = np.random.default_rng(0)
    dlse = jnp.asarray(rng.normal(size=(B, N, T)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=(N, T, S)), jnp.bfloat16) if biased else None
    sinks = jnp.array([-2.0, 0.0, 1.0, 5.0]) if sunk else None
    cotangent = cotangent if with_out else None

    @jax.jit
    def loss(qkv, bias, sinks):
        out, lse = run(*qkv, mask=MASKS[mask], bias=bias, sinks=sinks)
        total = jnp.where(lse == -jnp.inf, 0, lse * dlse).sum()
        return total if cotangent is None else total + (out * cotangent).sum(dtype=jnp.float32)

    argnums = (0, *(i for i, x in ((1, bias), (2, sinks)) if x is not None))
    got = jax.tree.leaves(jax.grad(loss, argnums)(qkv, bias, sinks))
    exact = oracle.attention_gradients(
        *qkv, cotangent=jnp.zeros((B, T, N, HV)) if cotangent is None else cotangent,
        lse_cotangent=dlse, allowed=table(MASKS[mask], T, S), bias=bias, sinks=sinks,
    )  # fmt: skip
    for one, other in zip(got, [x for x in exact[:5] if x is not None], strict=True):
        close(one, other)


@pytest.mark.sampled(0.13, slow=0.2)
@pytest.mark.parametrize("K", [2, 4])
@pytest.mark.parametrize("t", [1, 7, 40])
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
        return out, extend(q, *new), mapped, *pull(cotangent.astype(out.dtype))

    for got, want in zip(both("cudnn", q, *new), both("reference", q, *new), strict=True):
        close(got, want)
    assert {*layouts} == {primitives.AttentionLayout.BNTH.value}


@pytest.mark.sampled(0.31)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("window", [None, (6, 0)])
def test_cudnn_model_matches_jax_nn(causal: bool, lengths: bool, window) -> None:
    """It shows that the native arguments for cuDNN are the ones that `jax.nn` would pass."""
    q, k, v, _ = arrays(T, S, 2, "bfloat16")
    v = jnp.pad(v, ((0, 0),) * 3 + ((0, H - HV),))
    q_length, k_length = jnp.array([40, 11]), jnp.array([64, 23])
    if window is not None and (lengths or not causal):
        pytest.skip("rows without keys, or a window without an end")
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
