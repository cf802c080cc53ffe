"""The expected results in NumPy float64, written from the definitions.

It imports neither jax nor flax_mha, so that no mistake is made twice. The letters are the papers':
B batch (any number of axes), T queries, S keys, N heads, K key/value heads, H head features,
D model features.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray
Params = Mapping[str, Any]

# With BLAS, which is many times faster.
einsum = functools.partial(np.einsum, optimize=True)


def error(actual: Any, expected: Any) -> float:
    """Return ‖actual − expected‖ / ‖expected‖ over all leaves. Absolute if expected is 0."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    size = np.linalg.norm(expected.ravel())
    return float(np.linalg.norm((actual - expected).ravel()) / (size or 1.0))


def float64(tree: Any) -> Any:
    """Convert a tree of mappings and arrays to float64."""
    if isinstance(tree, Mapping):
        return {name: float64(leaf) for name, leaf in tree.items()}
    return np.asarray(tree, np.float64)


def random_like(tree: Any, seed: int = 0) -> Any:
    """Return parameters of the tree's shapes and dtypes, with no values that are 0 or 1."""
    rng = np.random.default_rng(seed)

    def fill(tree: Any) -> Any:
        if isinstance(tree, Mapping):
            return {name: fill(leaf) for name, leaf in tree.items()}
        return (0.4 * rng.normal(size=tree.shape)).astype(tree.dtype)

    return fill(tree)


class ScoreRule(NamedTuple):
    """A function of the scores, with its arrays.

    Attributes:
      value: the new scores [*B, N, T, S] of the scores.
      pullback: (ds, scores, sign) -> the cotangent of the scores, and gradients of arrays by name.
        A sign of −1 asks for the size of each sum instead: no summand may cancel another.
    """

    value: Callable[[Array], Array]
    pullback: Callable[[Array, Array, int], tuple[Array, dict[str, Array]]]

    @classmethod
    def soft_cap(cls, cap: float) -> "ScoreRule":
        """Return c·tanh(score/c)."""
        return cls(
            lambda s: cap * np.tanh(s / cap),
            lambda ds, s, sign: (ds * (1 - sign * np.tanh(s / cap) ** 2), {}),
        )


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    allowed: Array | None = None,
    bias: Array | None = None,
    scores: Sequence[ScoreRule] = (),
    sinks: Array | None = None,
    scale: float | None = None,
    keep: Array | None = None,
    rate: float = 0.0,
) -> tuple[Array, Array, Array]:
    """Compute attention from its definition. A fully masked query gives 0.

    Args:
      q: the queries [*B, T, N, H].
      k: the keys [*B, S, K, H]; query head n reads key head n // (N/K).
      v: the values [*B, S, K, Hv].
      allowed: the mask, bool, broadcastable to [*B, N, T, S].
      bias: a term of the scores, broadcastable to [*B, N, T, S].
      scores: functions of the scores, before the bias.
      sinks: an extra score [N] for each head; its weight is dropped.
      scale: the scale of the scores, 1/√H by default.
      keep: the weights that dropout keeps, bool [*B, N, T, S].
      rate: the dropout rate.
    """
    q, k, v = float64(q), float64(k), float64(v)
    k, v = (np.repeat(x, q.shape[-2] // x.shape[-2], axis=-2) for x in (k, v))
    s = einsum("...tnh,...snh->...nts", q, k)
    s = s * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    for rule in scores:
        s = rule.value(s)
    if bias is not None:
        s = s + float64(bias)
    if allowed is not None:
        s = np.where(allowed, s, -np.inf)
    top = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        top = np.maximum(top, float64(sinks)[:, None, None])
    top = np.where(np.isneginf(top), 0.0, top)
    exponentials = np.exp(s - top)
    total = exponentials.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(float64(sinks)[:, None, None] - top)
    weights = np.divide(exponentials, total, out=np.zeros_like(exponentials), where=total > 0)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    out = einsum("...nts,...snh->...tnh", dropped(weights, keep, rate), v)
    return out, lse, weights


def dropped(weights: Array, keep: Array | None, rate: float) -> Array:
    return weights if keep is None else np.where(keep, weights / (1 - rate), 0.0)


class Gradients(NamedTuple):
    q: Array
    k: Array
    v: Array
    bias: Array | None
    sinks: Array | None
    scores: dict[str, Array]


def attention_gradients(
    q: Array,
    k: Array,
    v: Array,
    *,
    cotangent: Array,
    lse_cotangent: Array | None = None,
    allowed: Array | None = None,
    bias: Array | None = None,
    scores: Sequence[ScoreRule] = (),
    sinks: Array | None = None,
    scale: float | None = None,
    keep: Array | None = None,
    rate: float = 0.0,
    cancelling: bool = True,
) -> Gradients:
    """Compute the gradients of Σ out·cotangent + Σ lse·lse_cotangent by the chain rule.

    The cotangents are [*B, T, N, Hv] and [*B, N, T]; for the other arguments see `attention`. With
    cancelling=False every summand is taken positive. The result is the size of the gradients if
    nothing cancelled, which rounding errors are proportional to.
    """
    _, lse, p = attention(
        q, k, v, allowed=allowed, bias=bias, scores=scores, sinks=sinks, scale=scale
    )
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    group = q.shape[-2] // k.shape[-2]
    dlse = np.zeros_like(lse) if lse_cotangent is None else float64(lse_cotangent)
    q, k, v, cotangent = float64(q), float64(k), float64(v), float64(cotangent)
    s = einsum("...tnh,...snh->...nts", q, np.repeat(k, group, axis=-2)) * scale
    sign = 1 if cancelling else -1
    if not cancelling:
        q, k, v, cotangent, dlse = map(np.abs, (q, k, v, cotangent, dlse))
    k_all, v_all = (np.repeat(x, group, axis=-2) for x in (k, v))
    dv = einsum("...nts,...tnh->...snh", dropped(p, keep, rate), cotangent)
    dp = dropped(einsum("...tnh,...snh->...nts", cotangent, v_all), keep, rate)
    # d lse / d score = p.
    mean = (dp * p).sum(-1, keepdims=True) - sign * dlse[..., None]
    ds = p * (dp - sign * mean)
    dbias = None if bias is None else summed_to(ds, np.shape(bias))
    dsinks = None
    if sinks is not None:
        weight = np.exp(float64(sinks)[:, None] - lse)
        dsinks = -(weight * mean[..., 0]).sum(-1).reshape(-1, len(sinks)).sum(0)
    ds, dscores = pulled_back(scores, s, ds, sign)
    dq = einsum("...nts,...snh->...tnh", ds, k_all) * scale
    dk = einsum("...nts,...tnh->...snh", ds, q) * scale
    return Gradients(dq, grouped(dk, group), grouped(dv, group), dbias, dsinks, dscores)


def pulled_back(
    scores: Sequence[ScoreRule], s: Array, ds: Array, sign: int = 1
) -> tuple[Array, dict[str, Array]]:
    """Return the cotangent of the scores s before all functions, and the gradients of arrays."""
    gradients: dict[str, Array] = {}
    steps = []
    for rule in scores:
        steps.append((rule, s))
        s = rule.value(s)
    for rule, before in reversed(steps):
        ds, of_arrays = rule.pullback(ds, before, sign)
        gradients |= of_arrays
    return ds, gradients


def grouped(x: Array, group: int) -> Array:
    """Return the sum over query heads that share a key/value head, [..., N, H] to [..., K, H]."""
    *lead, N, H = x.shape
    return x.reshape(*lead, N // group, group, H).sum(-2)


def summed_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Apply the transpose of broadcasting from this shape."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    return x.sum(tuple(a for a, n in enumerate(shape) if n == 1), keepdims=True).reshape(shape)


def project(params: Params, x: Array, contracted: int = 1) -> Array:
    """Compute x·W + b over the last axes of x."""
    y = np.tensordot(float64(x), float64(params["kernel"]), contracted)
    return y + float64(params["bias"]) if "bias" in params else y


def multi_head(
    params: Params,
    x_q: Array,
    x_k: Array | None = None,
    x_v: Array | None = None,
    *,
    turn: Any = None,
    **call: Any,
) -> tuple[Array, Array]:
    """Compute the layer's output and weights. `turn` rotates queries and keys, (q, k) to (q, k)."""
    x_k = x_q if x_k is None else x_k
    x_v = x_k if x_v is None else x_v
    q, k = project(params["query"], x_q), project(params["key"], x_k)
    if "query_ln" in params:
        q, k = layer_norm(params["query_ln"], q), layer_norm(params["key_ln"], k)
    if turn is not None:
        q, k = turn(q, k)
    out, _, weights = attention(q, k, project(params["value"], x_v), **call)
    if "out" not in params:
        return out.reshape(*out.shape[:-2], -1), weights
    return project(params["out"], out, contracted=2), weights


def layer_norm(params: Params, x: Array, epsilon: float = 1e-6) -> Array:
    """Compute (x − mean) / √(variance + ε) · scale + bias (Ba et al., 2016)."""
    centred = x - x.mean(-1, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * float64(params["scale"])
    return y + float64(params["bias"]) if "bias" in params else y


def rms_norm(params: Params, x: Array, epsilon: float = 1e-6) -> Array:
    """Compute x / √(mean of squares + ε) · scale (Zhang and Sennrich, 2019)."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * float64(params["scale"])


def gelu(x: Array) -> Array:
    """Compute the tanh approximation (Hendrycks and Gimpel, 2016, section 2)."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def relu(x: Array) -> Array:
    return np.where(x > 0, x, 0.0)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def gelu_exact(x: Array) -> Array:
    """Compute x·Φ(x) with the normal distribution."""
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def quick_gelu(x: Array) -> Array:
    return x / (1 + np.exp(-1.702 * x))


ACTIVATIONS = {
    "gelu": gelu, "gelu_exact": gelu_exact, "quick_gelu": quick_gelu, "relu": relu, "silu": silu,
}  # fmt: skip
NORMS = {"layernorm": layer_norm, "rmsnorm": rms_norm}


def mlp(params: Params, x: Array, activation: str = "gelu") -> Array:
    act = ACTIVATIONS[activation]
    up = project(params["up"], x)
    h = act(project(params["gate"], x)) * up if "gate" in params else act(up)
    return project(params["down"], h)


def encoder_block(
    params: Params,
    x: Array,
    *,
    norm: str = "layernorm",
    pre_norm: bool = True,
    activation: str = "gelu",
    epsilon: float = 1e-6,
    **call: Any,
) -> Array:
    """Compute pre-norm x + f(norm(x)) or post-norm norm(x + f(x)), for attention, then MLP."""

    def normed(name: str, x: Array) -> Array:
        return NORMS[norm](params[name], x, epsilon)

    x = float64(x)
    if pre_norm:
        x = x + multi_head(params["attention"], normed("attention_norm", x), **call)[0]
        return x + mlp(params["mlp"], normed("mlp_norm", x), activation)
    x = normed("attention_norm", x + multi_head(params["attention"], x, **call)[0])
    return normed("mlp_norm", x + mlp(params["mlp"], x, activation))


def sinusoidal(positions: Array, D: int, base: float = 10_000.0) -> Array:
    """Compute sin(i / base^(2c/D)) at 2c and cos at 2c+1 (Vaswani et al., 2017, 3.5)."""
    table = np.zeros((*np.shape(positions), D))
    for d in range(D):
        angle = np.asarray(positions, np.float64) / base ** (2 * (d // 2) / D)
        table[..., d] = np.cos(angle) if d % 2 else np.sin(angle)
    return table


def rotary(
    x: Array,
    positions: Array,
    *,
    base: float = 10_000.0,
    fraction: float = 1.0,
    interleaved: bool = False,
) -> Array:
    """Multiplies pair c, as a complex number, by e^(i·position·base^(−2c/R)) (Su et al., 2021).

    x is [*B, T, N, H], positions [T] or [*B, T]; the first R = fraction·H features turn.
    """
    y = np.array(x, np.float64)
    R = round(fraction * y.shape[-1])
    for c in range(R // 2):
        real, imaginary = (2 * c, 2 * c + 1) if interleaved else (c, c + R // 2)
        turn = np.exp(1j * np.asarray(positions, np.float64) * base ** (-2 * c / R))[..., None]
        z = (y[..., real] + 1j * y[..., imaginary]) * turn
        y[..., real], y[..., imaginary] = z.real, z.imag
    return y
