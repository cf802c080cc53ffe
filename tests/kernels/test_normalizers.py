"""Alternatives to the softmax: formulas in float64, gradients, and kernels that refuse them."""

import contextlib
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import (
    Capture,
    MultiHeadAttention,
    dot_product_attention,
    explain,
    masks,
)  # fmt: skip
from flax_mha.kernels import KERNELS
from flax_mha.scores import SoftCap
from tests.support.decoding import cache_of
from tests.support.meshes import on
from tests.support.oracle import error, float64, random_like

B, T, S, N, K, H = 2, 5, 7, 4, 2, 6
RNG = np.random.default_rng(0)
SHAPES = (B, T, N, H), (B, S, K, H), (B, S, K, H)
Q, KEYS, V = (RNG.normal(size=shape).astype(np.float32) for shape in SHAPES)
X = RNG.normal(size=(B, T, 16)).astype(np.float32)
KEY = jax.random.key(0)
NAMES = ["sigmoid", "softpick"]


def weights(name: str, s: np.ndarray, allowed: np.ndarray, count: Any = None) -> np.ndarray:
    """Compute the formulas for scores [B, N, T, S] in float64, of `count` keys (default: S)."""
    if name == "sigmoid":
        count = s.shape[-1] if count is None else count
        return np.where(allowed, 1 / (1 + np.exp(-s) * count), 0)
    e = np.where(allowed, np.expm1(s), 0)
    return np.maximum(e, 0) / (np.abs(e).sum(-1, keepdims=True) + 1e-8)


def expected(
    name: str, q: Any, k: Any, v: Any, allowed: np.ndarray, cap: Any = None, count: Any = None
) -> np.ndarray:
    k, v = (np.repeat(float64(x), N // K, -2) for x in (k, v))
    s = np.einsum("btnh,bsnh->bnts", float64(q), k) / np.sqrt(H)
    s = s if cap is None else cap * np.tanh(s / cap)
    return np.einsum("bnts,bsnh->btnh", weights(name, s, allowed, count), v)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("masked", [False, True])
def test_normalizers_match_formula(name: str, masked: bool) -> None:
    """For scores from a millionth to some hundreds. Fully masked queries give 0."""
    allowed = np.broadcast_to(np.arange(S) < np.arange(T)[:, None], (B, N, T, S))
    call: dict[str, Any] = {"mask": allowed[0, 0] if masked else None, "normalizer": name}
    allowed = allowed if masked else np.ones_like(allowed)

    @jax.jit
    def run(q: jax.Array) -> Any:
        out = dot_product_attention(q, KEYS, V, **call)
        return out, dot_product_attention(q, KEYS, V, scores=(SoftCap(3.0),), **call)

    for size in (1e-6, 1.0, 30.0):
        q = (size * Q).astype(np.float32)
        for out, cap in zip(run(q), (None, 3.0), strict=True):
            with np.errstate(over="ignore"):
                assert error(out, expected(name, q, KEYS, V, allowed, cap)) < 2e-6
            if masked:
                np.testing.assert_array_equal(out[:, 0], 0)


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1e-6, 1.0])
def test_normalizer_gradients_match_differences(name: str, size: float) -> None:
    """Finite differences of the formula in float64."""
    allowed = np.broadcast_to(np.arange(S) < 5, (B, N, T, S))
    cotangent = RNG.normal(size=Q.shape)

    def loss(q: Any, k: Any, v: Any) -> jax.Array:
        out = dot_product_attention(q, k, v, mask=masks.Keys(np.arange(S) < 5), normalizer=name)
        return jnp.vdot(out, cotangent.astype(np.float32))

    sized = (size * Q, KEYS, V)
    for n, grad in enumerate(jax.jit(jax.grad(loss, (0, 1, 2)))(*sized)):
        step = RNG.normal(size=grad.shape) * (size if n == 0 else 1.0)
        values = []
        for sign in (1, -1):
            given = [float64(x) for x in sized]
            given[n] = given[n] + sign * 1e-6 * step
            values.append((expected(name, *given, allowed, count=5) * cotangent).sum())
        slope = (values[0] - values[1]) / 2e-6
        assert abs(np.vdot(grad, step) - slope) < 1e-4 * np.abs(grad * step).sum()


def test_sigmoid_counts_the_tokens_of_a_call_without_lengths() -> None:
    layer = MultiHeadAttention(N, normalizer="sigmoid", mask=masks.Causal(), decode=True)
    x = RNG.normal(size=(2, 9, 16)).astype(np.float32)
    whole, cache = layer.clone(decode=False), cache_of(layer, x)
    params = random_like(jax.eval_shape(whole.init, KEY, x))
    step = jax.jit(functools.partial(layer.apply, mutable="cache"))
    out, _ = step(params | {"cache": cache}, x[:, :5])
    assert error(out, jax.jit(whole.apply)(params, x[:, :5])) < 2e-6


@pytest.mark.parametrize("on_mesh", [False, True])
def test_sigmoid_does_not_count_padding(on_mesh: bool) -> None:
    """By lengths, by a mask of keys with gaps, and by both. The masks are traced and static."""
    n, real = np.array([3, 5]), np.array([[1, 0, 1, 1, 0, 1, 1], [0, 1, 1, 1, 1, 0, 0]], bool)
    kept = np.arange(S) < n[:, None]
    cases = [
        (kept, masks.Lengths(n)),
        (real, masks.Keys(real)),
        (real & kept, masks.Lengths(n) & masks.Keys(real)),
        (real | True, masks.Lengths(S + 8)),
    ]
    static = [mask for _, mask in cases]

    @jax.jit
    def run(traced: Any) -> Any:
        attend = functools.partial(dot_product_attention, Q, KEYS, V, normalizer="sigmoid")
        return [attend(mask=mask) for mask in (*static, *traced)]

    with on("Explicit", shape=(2, 2)) if on_mesh else contextlib.nullcontext():
        found = jax.device_get(run(static))
    for out, (keys, _) in zip(found, 2 * cases, strict=True):
        count = keys.sum(-1)[:, None, None, None]
        wanted = expected("sigmoid", Q, KEYS, V, keys[:, None, None], count=count)
        assert error(out, wanted) < 2e-6


def test_other_kernels_and_rings_refuse_normalizers() -> None:
    told = explain(Q, KEYS, V, normalizer="sigmoid")
    assert told.chosen == "reference"
    for name in KERNELS.keys() - {"reference", "checkpointed"}:
        if "runs on" not in told.refused[name]:
            assert "has the softmax only, got normalizer='sigmoid'" in told.refused[name]
    with pytest.raises(ValueError, match="has the softmax only"):
        dot_product_attention(Q, KEYS, V, normalizer="softpick", kernel="blockwise")
    x = np.ones((2, 8, 4, 8), np.float32)
    mesh = jax.make_mesh((4,), ("context",), devices=jax.devices()[:4])
    with jax.set_mesh(mesh), nn.logical_axis_rules([("length", "context")]):
        assert explain(x, x, x, normalizer="sigmoid").strategy != "ring"
        with pytest.raises(ValueError, match="merges parts of a softmax"):
            dot_product_attention(x, x, x, normalizer="sigmoid", kernel="ring")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"normalizer": "relu"}, "normalizer must be one of"),
        ({"normalizer": "sigmoid", "sinks": np.ones(N, np.float32)}, "sinks take weight in a soft"),
        ({"normalizer": "softpick", "return_residuals": True}, "must be 'softmax' to return lse"),
        (
            {"normalizer": "sigmoid", "capture": Capture(("entropy",))},
            "must be 'softmax' to return entropy",
        ),
    ],
)
def test_invalid_combinations_raise(call: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dot_product_attention(Q, KEYS, V, **call)


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_the_largest_score_are_captured(name: str) -> None:
    capture = Capture(("weights", "max_logit"), heads=(2, 0), queries=(3, 1))
    allowed = np.tri(T, S, 1, dtype=bool)
    call = {"mask": allowed, "normalizer": name, "capture": capture, "return_weights": True}
    _, whole, seen = jax.jit(lambda *qkv: dot_product_attention(*qkv, **call))(Q, KEYS, V)
    s = np.einsum("btnh,bsnh->bnts", float64(Q), np.repeat(float64(KEYS), N // K, -2)) / np.sqrt(H)
    wanted = weights(name, s, allowed)
    assert error(whole, wanted) < 2e-6
    assert error(seen["weights"], wanted[:, [2, 0]][:, :, [3, 1]]) < 2e-6
    top = np.where(allowed, s, -np.inf).max(-1)
    assert error(seen["max_logit"], top[:, [2, 0]][:, :, [3, 1]]) < 2e-6
