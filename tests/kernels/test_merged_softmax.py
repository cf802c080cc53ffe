"""Parts of a softmax, merged or captured, at scores so large that a float32 lse tells nothing.

Products of small integers are exact. So each kernel has the same float32 scores, and the same
weights as the oracle has of these scores.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import Capture, KVCache, MultiHeadAttention, dot_product_attention, edits
from tests.support import oracle
from tests.support.meshes import on

RNG = np.random.default_rng(0)
B, T, N, H = 4, 16, 4, 4
Q, K = (RNG.integers(-1, 2, (B, T, N, H)).astype(np.float32) for _ in range(2))
V, DOUT = (RNG.normal(size=(B, T, N, H)).astype(np.float32) for _ in range(2))
# Rows of ordinary scores, of 1e6, all hidden by −1e9, and half hidden.
BIAS = np.zeros((B, 1, T, T), np.float32)
BIAS[1], BIAS[2], BIAS[3, ..., 8:] = 1e6, -1e9, -1e9
SCORES = np.einsum("btnh,bsnh->bnts", Q, K) + BIAS
DOUBLE = np.zeros_like(Q, np.float64)
STRATEGIES: dict[str, tuple[tuple[int, int], Any]] = {
    "ring:reference": ((2, 1), "data"),
    "ring:blockwise": ((4, 1), "data"),
    "usp": ((2, 2), ("data", "model")),
    "ulysses": ((4, 1), "data"),
    "all_gather": ((4, 1), "data"),
}


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, atol=2e-6 * max(1, np.abs(expected).max()))


@pytest.mark.sampled(0.08)
@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize("kernel", STRATEGIES)
def test_every_strategy_has_the_weights_of_the_scores(kernel: str) -> None:
    shape, axes = STRATEGIES[kernel]

    def loss(q: Any, k: Any, v: Any, bias: Any) -> Any:
        out, w = dot_product_attention(
            q, k, v, bias=bias, scale=1.0, kernel=kernel, return_weights=True
        )
        return (out * DOUT).sum(), (out, w)

    with on("Auto", [("length", axes)], shape):
        fn = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))
        (_, (out, weights)), grads = fn(Q, K, V, BIAS)
    want, _, want_weights = oracle.attention(DOUBLE, K, V, bias=SCORES)
    close(out, want)
    close(weights, want_weights)
    ds = oracle.attention_gradients(DOUBLE, K, V, bias=SCORES, cotangent=DOUT)
    close(grads[0], np.einsum("bnts,bsnh->btnh", ds.bias, K))
    close(grads[1], np.einsum("bnts,btnh->bsnh", ds.bias, Q))
    close(grads[2], ds.v)
    close(grads[3], ds.bias.sum(1, keepdims=True))


@pytest.mark.sampled(0.08)
@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_devices_with_slots_merge_by_maxima_and_sums() -> None:
    empty = KVCache.empty((B,), T, N, H)

    def loss(q: Any, bias: Any, sinks: Any) -> Any:
        cache = empty.append(K[:, :-1], V[:, :-1])
        call = {"bias": bias, "scale": 1.0, "sinks": sinks}
        out, _ = cache.extend(q, K[:, -1:], V[:, -1:], **call)
        return (out * DOUT[:, :1]).sum(), out

    # At the level of the scores.
    sinks = np.float32([-1e9, 1e6, 0, 1])
    with on("Auto", [("cache_length", "data")], (4, 1)):
        fn = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
        (_, out), grads = fn(Q[:, :1], BIAS[:, :, :1], sinks)
    call = {"bias": SCORES[:, :, :1], "sinks": sinks}
    close(out, oracle.attention(DOUBLE[:, :1], K, V, **call)[0])
    want = oracle.attention_gradients(DOUBLE[:, :1], K, V, cotangent=DOUT[:, :1], **call)
    close(grads[0], np.einsum("bnts,bsnh->btnh", want.bias, K))
    close(grads[1], want.bias.sum(1, keepdims=True))
    close(grads[2], want.sinks)


@pytest.mark.sampled(0.08)
def test_nan_of_an_example_changes_no_gradient_of_others_with_slots_on_devices() -> None:
    k = jnp.asarray(V)

    @jax.jit
    @jax.grad
    def gradient(k: jax.Array) -> jax.Array:
        cache = KVCache.empty((B,), T, N, H).append(k[:, :-1], k[:, :-1])
        out, _ = cache.extend(k[:, :1], k[:, -1:], k[:, -1:], sinks=jnp.ones(N))
        return jnp.sin(out[1]).sum()

    with on("Auto", [("cache_length", "data")], (2, 1)):
        got, want = gradient(k.at[0, 2].set(jnp.nan)), gradient(k)
    np.testing.assert_array_equal(got[1:], want[1:])


@pytest.mark.sampled(0.08)
def test_captured_weights_sum_to_one_and_an_edit_that_keeps_them_changes_nothing() -> None:
    layer = MultiHeadAttention(2, capture=Capture(("weights",)))
    x = jnp.asarray(RNG.normal(size=(2, 6, 8)), jnp.float32)
    variables = oracle.random_like(jax.eval_shape(layer.init, jax.random.key(0), x))
    bias = BIAS[1:3, :, :6, :6]
    out, sown = layer.apply(variables, x, bias=bias, mutable="intermediates")
    weights = sown["intermediates"]["attention_weights"][0]
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    edited = edits.attach(layer, variables, {"attention_weights": edits.Edit(keep=1)}, x)
    same = layer.apply(edited, x, bias=bias, mutable="intermediates")[0]
    np.testing.assert_allclose(same, out, atol=1e-6)
