"""Kernels with overflow, underflow, NaN and empty inputs, over several tiles, with gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import dot_product_attention
from flax_mha.masks import Causal, Lengths, Mask, Segments, Window
from flax_mha.scores import Alibi
from tests.kernels.cases import KERNELS, pairs
from tests.kernels.problems import SINKS
from tests.support import oracle

B, N, K, H = 2, 4, 2, 8
T, S = 150, 280
kernels = pytest.mark.parametrize("kernel", KERNELS)
DROPOUT = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(5)}


def arrays(t: int = T, s: int = S) -> list[jax.Array]:
    """Return q, k, v and a cotangent."""
    rng = np.random.default_rng(4)
    sizes = [(t, N, H), (s, K, H), (s, K, H), (t, N, H)]
    return [jnp.asarray(rng.normal(size=(B, *size)), jnp.float32) for size in sizes]


def pulled(kernel: str, **call: Any) -> Any:
    """Return a function of q, k, v and a cotangent that computes out and the gradients."""

    @jax.jit
    def run(q, k, v, cotangent):
        out, pull = jax.vjp(
            lambda *qkv: dot_product_attention(*qkv, kernel=kernel, **call), q, k, v
        )
        return out, *pull(cotangent)

    return run


# All pairs of these occur, not their whole product; so below.
@pytest.mark.sampled(0.2)
@pytest.mark.parametrize(
    ("kernel", "dtype", "limited"),
    pairs(kernel=KERNELS, dtype=("float32", "bfloat16", "float16"), limited=(False, True)),
)
def test_scores_of_ten_thousand_match_oracle(kernel: str, dtype: str, limited: bool) -> None:
    """The inputs are integers, which no dtype rounds, so results are as exact as elsewhere."""
    rng = np.random.default_rng(5)
    q, k = rng.integers(-80, 81, (B, T, N, H)), rng.integers(-80, 81, (B, S, K, H))
    # Pairs of keys with scores at most 1 apart, and very different gradients.
    k[:, 1::2, :, :-2] = k[:, ::2, :, :-2]
    k[:, 1::2, :, 0] += 1
    q[..., 0], q[..., -2:] = rng.integers(-1, 2, (B, T, N)), 0
    allowed = np.arange(S) <= np.arange(T)[:, None]
    known: dict[str, Any] = {"scale": 1.0} | ({"allowed": allowed} if limited else {})
    call: dict[str, Any] = {"scale": 1.0} | ({"mask": Causal()} if limited else {})
    if limited:
        known["sinks"] = np.array([1e4, -1e4, 5e3, 0.0], np.float32)
        call["sinks"] = jnp.asarray(known["sinks"])
    _, _, v, cotangent = arrays()
    operands = [jnp.asarray(x, dtype) for x in (q, k, v, cotangent)]
    expected, lse, _ = oracle.attention(*operands[:3], **known)
    assert np.abs(lse).max() > 1e4
    exact = oracle.attention_gradients(*operands[:3], cotangent=operands[3], **known)
    out, *grads = pulled(kernel, **call)(*operands)
    eps = float(jnp.finfo(dtype).eps)
    assert oracle.error(out, expected) < max(2e-6, eps)
    for got, want in zip(grads, exact, strict=False):
        assert oracle.error(got, want) < max(1e-5, 4 * eps)


MORE = DROPOUT | {"scores": (Alibi(),)}
FORBIDDEN: dict[str, dict[str, Any]] = {
    "dense": {"mask": np.zeros((T, S), bool)}, "lengths": {"mask": Lengths(jnp.array([0, 0]))},
    "bias": {"bias": jnp.full((T, S), -jnp.inf)},
}  # fmt: skip


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize(
    ("kernel", "name", "more"), pairs(kernel=KERNELS, name=(*FORBIDDEN,), more=(False, True))
)
def test_fully_masked_queries_give_zero(kernel: str, name: str, more: bool) -> None:
    """Exactly 0 and no gradient, for every kind of mask."""
    q, k, v, _ = arrays()
    call = FORBIDDEN[name] | (MORE if more else {})

    @jax.jit
    def run(q, k, v):
        out, pull = jax.vjp(
            lambda *qkv: dot_product_attention(
                *qkv, kernel=kernel, return_weights=True, return_residuals=True, **call
            ),
            q, k, v,
        )  # fmt: skip
        return out, pull(jax.tree.map(jnp.ones_like, out))

    (out, weights, lse), grads = run(q, k, v)
    np.testing.assert_array_equal(lse, -np.inf)
    for x in (out, weights, *grads):
        np.testing.assert_array_equal(x, 0)


@pytest.mark.slow
@kernels
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
def test_fully_masked_queries_among_others_give_zero(kernel: str, sinks: np.ndarray | None) -> None:
    """Their neighbors in a tile do not change that."""
    lengths = np.random.default_rng(6).integers(0, 3, (B, T)) * 90
    sinks = None if sinks is None else jnp.asarray(sinks)

    def run(lengths, operands):
        return pulled(kernel, mask=Lengths(lengths), sinks=sinks)(*operands)

    for out, dq, *_ in (run(lengths, arrays()), jax.jit(run)(lengths, arrays())):
        for x in (out, dq):
            np.testing.assert_array_equal(x[lengths == 0], 0)
            assert np.abs(x[lengths > 0]).sum((-1, -2)).all()


SEGMENTS = Segments(np.arange(T) // 50, np.arange(S) // 50)
# A mask, its fully masked queries, and its keys that no query sees.
UNSEEN: dict[str, tuple[Mask | np.ndarray, list[int], list[int]]] = {
    "dense": ((np.arange(S) != 4)[None] & (np.arange(T) != 2)[:, None], [2], [4]),
    "lengths": (Lengths(jnp.array([100, 139])), [], [139, 200, S - 1]),
    "lengths_of_both": (Lengths(np.array([40, 70]), q=np.array([9, 99])), [99, 149], [70, S - 1]),
    "segments": (SEGMENTS, [], [150, 200, S - 1]),
    "causal": (Causal(), [], [T, S - 1]),
    "window": (Window(3, 3), [], [T + 3, S - 1]),
}


@pytest.mark.sampled(0.08)
@kernels
@pytest.mark.parametrize("name", UNSEEN)
def test_masked_values_do_not_leak(kernel: str, name: str) -> None:
    """Huge numbers in a masked key, value or query change neither outputs nor gradients."""
    mask, queries, keys = UNSEEN[name]
    q, k, v, cotangent = arrays()
    at_q, at_k = (jnp.array(x, int) for x in (queries, keys))
    run = pulled(kernel, mask=mask, scores=(Alibi(),), **DROPOUT)
    clean = run(q, k, v, cotangent)
    for huge in (3e38, -3e38):
        dirty = (q.at[:, at_q].set(huge), k.at[:, at_k].set(huge), v.at[:, at_k].set(huge))
        for got, want in zip(run(*dirty, cotangent), clean, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.sampled(0.16)
@kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_huge_masked_numbers_do_not_leak(kernel: str, dtype: str) -> None:
    """They are finite but their products are not: infinity times a weight of 0 must not count."""
    check_huge_masked_numbers(kernel, dtype)


@pytest.mark.sampled(0.25, slow=0.2)
@pytest.mark.parametrize("kernel", ["short", "flex"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_huge_masked_numbers_do_not_leak_on_tpu(tpu, kernel: str, dtype: str) -> None:
    check_huge_masked_numbers(kernel, dtype)


def check_huge_masked_numbers(kernel: str, dtype: str) -> None:
    q, k, v, cotangent = (x.astype(dtype) for x in arrays(60, 90))
    run = pulled(kernel, mask=np.arange(90) != 4)
    clean = run(q, k, v, cotangent)
    for huge in (jnp.finfo(dtype).max, jnp.finfo(dtype).min, 1e37):
        dirty = run(q, k.at[:, 4].set(huge), v.at[:, 4].set(huge), cotangent)
        for got, want in zip(dirty, clean, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.sampled(0.1)
@kernels
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
def test_cotangents_of_fully_masked_queries_count_as_zero(
    kernel: str, sinks: np.ndarray | None
) -> None:
    """For their outputs, and without a sink for their lse. NaN there reaches no gradient."""
    q, k, v, cotangent = arrays(60, 90)
    dlse = jnp.ones((B, N, 60))
    sinks = None if sinks is None else jnp.asarray(sinks)

    @jax.jit
    def run(cotangents):
        def attend(q, k, v, sinks):
            return dot_product_attention(
                q, k, v, mask=Lengths(np.array([70, 0])), kernel=kernel, sinks=sinks,
                return_residuals=True,
            )  # fmt: skip

        return jax.vjp(attend, q, k, v, sinks)[1](cotangents)

    clean = run((cotangent.at[1].set(0), dlse if sinks is not None else dlse.at[1].set(0)))
    dirty = (cotangent.at[1].set(jnp.nan), dlse if sinks is not None else dlse.at[1].set(jnp.nan))
    for got, want in zip(jax.tree.leaves(run(dirty)), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(got, want)


EMPTY: Any = {"plain": {}, "causal": {"mask": Causal()}, "more": {"mask": Causal(), **MORE}}


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize(
    ("kernel", "name", "sizes"),
    pairs(kernel=KERNELS, name=(*EMPTY,), sizes=((0, 0), (0, 3), (3, 0), (0, 300), (300, 0))),
)
def test_empty_queries_or_keys_give_zero(kernel: str, name: str, sizes: tuple[int, int]) -> None:
    out, *grads = pulled(kernel, **EMPTY[name])(*arrays(*sizes))
    assert out.shape == (B, sizes[0], N, H)
    for x in (out, *grads):
        np.testing.assert_array_equal(x, 0)


@pytest.mark.sampled(0.25, slow=0.2)
@kernels
def test_lse_without_keys_is_the_sink(kernel: str) -> None:
    """The sink takes its gradient."""
    q, k, v, _ = arrays(3, 0)

    def total(sinks):
        out, lse = dot_product_attention(q, k, v, sinks=sinks, kernel=kernel, return_residuals=True)
        return out.sum() + lse.sum()

    value, gradient = jax.value_and_grad(total)(jnp.asarray(SINKS))
    np.testing.assert_allclose(value, B * 3 * SINKS.sum())
    np.testing.assert_array_equal(gradient, B * 3)


@pytest.mark.sampled(0.16)
@kernels
def test_repeated_calls_are_bitwise_equal(kernel: str) -> None:
    run = pulled(kernel, mask=Causal() & SEGMENTS, **DROPOUT)
    one, other = (run(*arrays()) for _ in range(2))
    for x, y in zip(one, other, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_kernels_drop_the_same_weights() -> None:
    """Bit by bit. With values that are one-hot in the key, the output shows the kept weights."""
    q, k, _, _ = arrays()
    v = jnp.broadcast_to(jnp.eye(S)[:, None, :], (B, S, K, S))
    allowed = np.arange(S) <= np.arange(T)[:, None]
    for broadcast in (False, True):
        patterns = [
            np.asarray(
                jax.jit(
                    lambda q, k, v, kernel=kernel, broadcast=broadcast: dot_product_attention(
                        q, k, v, mask=Causal(), kernel=kernel, broadcast_dropout=broadcast,
                        **DROPOUT,
                    )
                )(q, k, v) != 0
            )
            for kernel in KERNELS
        ]  # fmt: skip
        for pattern in patterns:
            np.testing.assert_array_equal(pattern, patterns[0])
        assert 0.65 < patterns[0].mean((0, 2))[allowed].mean() < 0.75


LONG = 32768


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("mask", [Causal(), Causal() & Window(left=300)], ids=["causal", "window"])
def test_long_sequences_match_oracle(mask: Mask) -> None:
    """Some queries at T = 32,768, and the gradients that they reach."""
    rng = np.random.default_rng(7)
    q, k, v = (jnp.asarray(rng.normal(size=(LONG, 1, H)), jnp.float32) for _ in range(3))
    some = np.array([0, 1, 255, 256, 511, 512, 20_000, LONG - 1])
    rows = jnp.asarray(rng.normal(size=(len(some), 1, H)), jnp.float32)
    cotangent = jnp.zeros_like(q).at[some].set(rows)
    out, dq, dk, dv = pulled("blockwise", mask=mask)(q, k, v, cotangent)
    allowed = np.arange(LONG) <= some[:, None]
    if mask != Causal():
        allowed &= np.arange(LONG) >= some[:, None] - 300
    expected, _, _ = oracle.attention(q[some], k, v, allowed=allowed)
    exact = oracle.attention_gradients(q[some], k, v, cotangent=rows, allowed=allowed)
    assert oracle.error(out[some], expected) < 2e-6
    for got, want in ((dq[some], exact.q), (dk, exact.k), (dv, exact.v)):
        assert oracle.error(got, want) < 1e-5
    np.testing.assert_array_equal(jnp.delete(dq, some, axis=0), 0)


@pytest.mark.sampled(0.13, slow=0.2)
def test_memory_is_linear_in_length() -> None:
    """At T = 32,768 the scores of a head would need 4 GiB."""
    x = jax.ShapeDtypeStruct((LONG, 1, H), jnp.float32)

    def loss(q, k, v):
        return dot_product_attention(q, k, v, mask=Causal(), kernel="blockwise").sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 2**20
