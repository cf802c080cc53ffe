"""Forgetting attention against its formula, its cache, and the features that every layer has."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import CacheConfig, masks
from flax_mha.variants import ForgettingAttention
from tests.support import oracle
from tests.support.decoding import cache_of, decoded
from tests.support.layer_checks import check_gradients, drawn
from tests.support.oracle import einsum, error, float64

N, K, H, D, T = 4, 2, 6, 16, 10
X = np.random.default_rng(0).normal(size=(2, T, D)).astype(np.float32)


def layer(**fields: Any) -> ForgettingAttention:
    return ForgettingAttention(N, **{"num_kv_heads": K, "head_dim": H} | fields)


def gate_sums(params: Any, x: np.ndarray, told: Any = True) -> np.ndarray:
    """Return c_i − c_j of each head, [B, N, T, T]: the log gates between j and i where `told`."""
    z = einsum("btd,dn->bnt", x, params["forget_gate"]["kernel"]) + params["forget_bias"][:, None]
    logs = np.where(told, -np.log1p(np.exp(-z)), 0)
    i, j, gate = np.ogrid[: x.shape[1], : x.shape[1], : x.shape[1]]
    return einsum("bnl,ijl->bnij", logs, (j < gate) & (gate <= i))


def expected(params: Any, x: Any, **call: Any) -> np.ndarray:
    x, p = float64(x), float64(params)
    causal = np.tri(x.shape[1], dtype=bool)
    return oracle.multi_head(p, x, bias=gate_sums(p, x), allowed=causal, **call)[0]


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("kernel", ["reference", "blockwise"])
def test_forgetting_attention_matches_formula(kernel: str) -> None:
    module = layer(kernel=kernel)
    params = drawn(module, X)
    assert error(jax.jit(module.apply)(params, X), expected(params["params"], X)) < 5e-6


@pytest.mark.sampled(0.08)
def test_gate_gradients_match_differences() -> None:
    groups = ("forget_gate",), ("forget_bias",), ("query", "key", "value", "out")
    check_gradients(layer(kernel="blockwise"), X, expected, *groups)


@pytest.mark.sampled(0.096)
@pytest.mark.parametrize("window", [False, True])
def test_bfloat16_cache_keeps_gates_exact(window: bool) -> None:
    """Only keys and values are rounded, however large the sums of the gates are."""
    fields = {"mask": masks.Window(4, 0)} if window else {}
    module = layer(**fields)
    params = drawn(module, X)
    # Every token forgets nearly all: c is near −3,000 at the end. Keys are zero.
    params["params"]["forget_bias"] = np.full(N, -300.0, np.float32)
    params["params"]["key"]["kernel"] *= 0
    params["params"]["forget_gate"]["kernel"] *= 0
    params["params"]["forget_bias"][1:] = -300.3, -300.7, -0.01
    whole = jax.jit(module.apply)(params, X)
    config = CacheConfig(dtype="bfloat16", slots=5 if window else None)
    cached = module.clone(decode=True, cache=config)
    assert error(decoded(cached, params, X), np.asarray(whole)) < 4e-3
    held = cache_of(cached, X)["kv"]
    assert held.key.dtype == jnp.bfloat16
    append = jax.jit(functools.partial(cached.apply, mutable="cache"))
    _, after = append({**params, "cache": {"kv": held}}, X[:, :5])
    parts = float64(after["cache"]["kv"].key)[:, :, :5, H:].reshape(2, K, 5, 5, N // K).sum(-2)
    bias = params["params"]["forget_bias"].reshape(K, 1, -1)
    c = np.cumsum(np.broadcast_to(-np.logaddexp(0, -float64(bias)), (2, K, 5, N // K)), 2)
    np.testing.assert_allclose(parts, c, rtol=3e-7)


@pytest.mark.sampled(0.2)
def test_far_gates_keep_their_digits() -> None:
    """The last tokens of a text, given with it, and step by step, are as these tokens alone.

    So are their gradients. The sum of all gates is near −5,400.
    """
    length, last = 2**12, 16
    x = np.random.default_rng(1).normal(size=(1, length, 4)).astype(np.float32)
    module = ForgettingAttention(2, num_kv_heads=1, head_dim=4, mask=masks.Window(1, 0))
    params = drawn(module, x[:, :8])
    params["params"]["forget_bias"] = np.full(2, -1.0, np.float32)

    def loss(x: jax.Array) -> Any:
        out = module.apply(params, x)[:, 1 - last :]
        return jnp.sin(3 * out).sum(), out

    pull = jax.jit(jax.grad(loss, has_aux=True))
    (near, wanted), (far, out) = (pull(x[:, -n:]) for n in (last, length))
    assert error(out, wanted) < 1e-5
    assert error(far[:, 1 - last :], near[:, 1 - last :]) < 1e-4
    steps = decoded(module.clone(decode=True), params, x, (length - last, 1, last - 1))
    assert error(steps[:, 1 - last :], wanted) < 1e-5


REAL = np.ones((2, T), bool)
REAL[0, [0, 4]] = REAL[1, 7:9] = False


@pytest.mark.slow
def test_hidden_tokens_change_nothing() -> None:
    """Hidden tokens reach no output, gradient or step: their gates are 1."""
    module = layer(mask=masks.Keys(REAL), kernel="blockwise")
    params = drawn(module, X)
    bad = np.where(REAL[..., None], X, 1e6)
    x, p = float64(X), float64(params["params"])
    allowed = np.tri(T, dtype=bool) & REAL[:, None, None]
    bias = gate_sums(p, x, REAL[:, None])
    wanted = oracle.multi_head(p, x, bias=bias, allowed=allowed)[0]

    def loss(params: Any, x: Any) -> tuple[jax.Array, jax.Array]:
        out = module.apply(params, x)
        return jnp.sum(jnp.sin(out[REAL])), out

    pull = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    (clean, _), (dirty, out) = pull(params, X), pull(params, bad)
    assert error(out[REAL], wanted[REAL]) < 5e-6
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    steps = decoded(module.clone(decode=True), params, bad, (3, 1, 1, 5))
    assert error(steps[REAL], wanted[REAL]) < 5e-6


@pytest.mark.slow
def test_nan_gate_gives_nan_output() -> None:
    params = drawn(layer(), X)
    params["params"]["forget_gate"]["kernel"][3, 1] = np.nan
    assert np.isnan(jax.jit(layer().apply)(params, X)).all()


@pytest.mark.slow
def test_lengths_order_norms_and_gates() -> None:
    """Ragged rows, in a cache too, and tokens in another order."""
    module = layer(gate="head", normalize_qk=True, sinks=True, scale="learned")
    params = drawn(module, X)
    lengths = np.array([T, 6])
    bad = np.where((np.arange(T) < lengths[:, None])[..., None], X, np.nan)
    out = jax.jit(module.apply)(params, bad, lengths=lengths)
    whole = jax.jit(module.apply)(params, X)
    # Padding attends to nothing: only the bias is left.
    bias = params["params"]["out"]["bias"]
    np.testing.assert_array_equal(out[1, 6:], np.broadcast_to(bias, (T - 6, D)))
    assert error(out[1, :6], whole[1, :6]) < 1e-6
    order = np.random.default_rng(3).permutation(T)
    turned = jax.jit(functools.partial(module.apply, order=order))(params, X[:, order])
    assert error(turned, whole[:, order]) < 1e-5
    cached = module.clone(decode=True)
    step = jax.jit(functools.partial(cached.apply, mutable="cache"))
    cache = cache_of(cached, X)
    first, cache = step({**params, "cache": cache}, bad[:, :8], lengths=np.array([8, 6]))
    second, _ = step({**params, **cache}, X[:, [8, 6]][:, :1], lengths=np.array([1, 1]))
    assert error(first[1, :6], whole[1, :6]) < 1e-5
    assert error(second[0, 0], whole[0, 8]) < 1e-5
