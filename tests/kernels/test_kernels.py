"""Every kernel against the NumPy float64 oracle, forward and gradients."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from flax_mha import dot_product_attention, explain, kernels
from flax_mha.masks import Causal, Lengths
from tests import oracle

# Those that run every call, anywhere.
KERNELS = ("blockwise", "reference")
B, T, S, N, H = 2, 7, 9, 4, 8
HEADS = {"mha": (4, 8), "gqa": (2, 8), "mqa": (1, 8), "dv": (2, 5)}
MASKS = {
    "none": (None, None),
    "causal": (Causal(), np.arange(S) <= np.arange(T)[:, None]),
    # The second row of the batch sees nothing at all.
    "lengths": (Lengths(jnp.array([4, 0])), (np.arange(S) < np.array([[4], [0]]))[:, None, None]),
    "dense": (np.random.default_rng(3).random((B, N, T, S)) < 0.5,) * 2,
}
# One unit in the last place of the dtype, times what a sum of a few dozen terms loses.
TOLERANCE = {"float32": (2e-6, 1e-5), "bfloat16": (1e-2, 3e-2), "float16": (1e-3, 4e-3)}


def arrays(rng: np.random.Generator, K: int, Hv: int, batch=(B,)) -> tuple[np.ndarray, ...]:
    sizes = [(T, N, H), (S, K, H), (S, K, Hv), (T, N, Hv)]
    return tuple(rng.normal(size=(*batch, *size)) for size in sizes)


def error(got, expected) -> float:
    got, expected = np.asarray(got, np.float64), np.asarray(expected)
    return float(np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("dtype", "bias"),
    [("float32", True), ("float32", False), ("bfloat16", False), ("float16", True)],
)
def test_against_the_oracle(rng, kernel, heads, mask, dtype, bias) -> None:
    *qkv, cotangent = (x.astype(dtype) for x in map(jnp.asarray, arrays(rng, *HEADS[heads])))
    ours, allowed = MASKS[mask]
    added = jnp.asarray(rng.normal(size=(N, 1, S)), jnp.float32) if bias else None

    @jax.jit
    def run(q, k, v, added):
        out, vjp, lse = jax.vjp(
            lambda *a: dot_product_attention(
                *a[:3], mask=ours, bias=a[3], kernel=kernel, return_residuals=True
            ),
            q, k, v, added, has_aux=True,
        )  # fmt: skip
        return out, lse, vjp(cotangent)

    out, lse, grads = run(*qkv, added)
    exact = [np.asarray(x, np.float64) for x in (*qkv, cotangent)]
    exact_bias = None if added is None else np.asarray(added, np.float64)
    expected, expected_lse, _ = oracle.attention(*exact[:3], allowed=allowed, bias=exact_bias)
    forward, backward = TOLERANCE[dtype]
    assert out.dtype == dtype
    assert lse.dtype == jnp.float32
    assert error(out, expected) < forward
    finite = np.isfinite(expected_lse)
    np.testing.assert_array_equal(np.isneginf(lse), ~finite)
    np.testing.assert_allclose(lse[finite], expected_lse[finite], atol=1e-5)
    exact_grads = oracle.attention_gradients(
        *exact[:3], allowed=allowed, bias=exact_bias, cotangent=exact[3]
    )
    for got, want in zip(grads, exact_grads, strict=False):
        if got is not None:
            assert error(got, want) < backward


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_query_that_sees_nothing(rng, kernel) -> None:
    """Exactly 0 and no gradient, whichever way it was forbidden."""
    q, k, v, _ = (jnp.asarray(x, jnp.float32) for x in arrays(rng, N, H))
    forbidden = {"mask": jnp.zeros((T, S), bool)}, {"bias": jnp.full((T, S), -jnp.inf)}
    for call in forbidden:

        @jax.jit
        def run(q, k, v, call=call):
            results, vjp = jax.vjp(
                lambda *a: dot_product_attention(
                    *a, kernel=kernel, return_weights=True, return_residuals=True, **call
                ),
                q, k, v,
            )  # fmt: skip
            return results, vjp(jax.tree.map(jnp.ones_like, results))

        (out, weights, lse), grads = run(q, k, v)
        np.testing.assert_array_equal(lse, -np.inf)
        for x in (out, weights, *grads):
            np.testing.assert_array_equal(x, 0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_masked_pairs_do_not_leak(rng, kernel, poison) -> None:
    """What a masked key, value or query holds changes nothing, forward and backward."""
    q, k, v, cotangent = (jnp.asarray(x, jnp.float32) for x in arrays(rng, 2, H))
    mask = (np.arange(S) != 4)[None] & (np.arange(T) != 2)[:, None]

    def run(q, k, v):
        out, vjp = jax.vjp(lambda *a: dot_product_attention(*a, mask=mask, kernel=kernel), q, k, v)
        return out, *vjp(cotangent)

    clean = jax.jit(run)(q, k, v)
    dirty = jax.jit(run)(q.at[:, 2].set(poison), k.at[:, 4].set(poison), v.at[:, 4].set(poison))
    for got, want in zip(dirty, clean, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kernel", KERNELS)
def test_visible_nans_are_seen(rng, kernel) -> None:
    """A NaN reaches the queries that may see it, and only those."""
    q, k, v, _ = (jnp.asarray(x, jnp.float32) for x in arrays(rng, 2, H))
    for poisoned in ((q, k.at[:, 4].set(jnp.nan), v), (q, k, v.at[:, 4].set(jnp.nan))):
        out = jax.jit(lambda *a: dot_product_attention(*a, mask=Causal(), kernel=kernel))(*poisoned)
        assert np.isnan(out[:, 4:]).all()
        assert np.isfinite(out[:, :4]).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_batch_dimensions_and_vmap(rng, kernel, batch) -> None:
    q, k, v, _ = (jnp.asarray(x, jnp.float32) for x in arrays(rng, 2, H, batch))

    def one(q, k, v):
        return dot_product_attention(q, k, v, mask=Causal(), kernel=kernel)

    mapped = one
    for _ in batch:
        mapped = jax.vmap(mapped)
    np.testing.assert_allclose(jax.jit(one)(q, k, v), jax.jit(mapped)(q, k, v), atol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_queries_and_no_keys(kernel) -> None:
    for t, s in itertools.product((0, 3), (0, 3)):
        q, k = jnp.ones((2, t, N, H)), jnp.ones((2, s, N, H))
        out = dot_product_attention(q, k, k, kernel=kernel)
        assert out.shape == (2, t, N, H)
        np.testing.assert_array_equal(out, 1 if s else 0)
        grads = jax.grad(lambda *a: dot_product_attention(*a, kernel=kernel).sum(), (0, 1, 2))
        assert all(np.isfinite(grad).all() for grad in grads(q, k, k))


@pytest.mark.parametrize("kernel", KERNELS)
def test_extreme_scores(rng, kernel) -> None:
    q, k, v, _ = arrays(rng, N, H)
    q = 1e4 * q
    expected, _, _ = oracle.attention(*(x.astype(np.float32) for x in (q, k, v)))
    out = dot_product_attention(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), kernel=kernel)
    # Scores of 1e4 have an absolute rounding error of 1e-3.
    assert error(out, expected) < 1e-2


@pytest.mark.parametrize("kernel", KERNELS)
def test_scale_and_positions(rng, kernel) -> None:
    q, k, v, _ = arrays(rng, N, H)
    q_pos, k_pos = np.arange(T)[::-1] + 1, np.arange(S) * 2
    expected, _, _ = oracle.attention(q, k, v, scale=0.7, allowed=k_pos <= q_pos[:, None])
    got = dot_product_attention(
        *(jnp.asarray(x, jnp.float32) for x in (q, k, v)), scale=0.7, mask=Causal(),
        q_positions=jnp.asarray(q_pos), kv_positions=jnp.asarray(k_pos), kernel=kernel,
    )  # fmt: skip
    assert error(got, expected) < 2e-6


def test_second_derivatives(rng) -> None:
    with jax.enable_x64(True):
        q, k, v, _ = (jnp.asarray(x) for x in arrays(rng, 2, H))

        @jax.jit
        def loss(q, k, v):
            return (dot_product_attention(q, k, v, mask=MASKS["lengths"][0]) ** 2).sum()

        assert loss(q, k, v).dtype == jnp.float64
        check_grads(loss, (q, k, v), order=2, modes=["rev"])


def test_explain_runs_nothing_and_tells_the_choice() -> None:
    shape = jax.ShapeDtypeStruct((2, 10**6, 4, 64), jnp.bfloat16)
    explanation = explain(shape, shape, shape, mask=Causal())
    assert explanation.chosen in KERNELS
    assert [line.split()[0] for line in str(explanation).splitlines()] == list(kernels.KERNELS)
    assert "chosen" in str(explanation)


@pytest.mark.parametrize("kernel", KERNELS)
def test_repeats_are_bit_equal(rng, kernel) -> None:
    q, k, v, _ = (jnp.asarray(x, jnp.float32) for x in arrays(rng, 2, H))
    call = jax.jit(lambda: dot_product_attention(
        q, k, v, mask=Causal(), dropout_rate=0.5, dropout_rng=jax.random.key(0), kernel=kernel
    ))  # fmt: skip
    np.testing.assert_array_equal(call(), call())
