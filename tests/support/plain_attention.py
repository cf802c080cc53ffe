"""Attention in plain operations of a chosen dtype: the yardstick of rounding.

Matmuls of the dtype are summed in float32, with a float32 softmax between them. This is the
computation of `jax.nn.dot_product_attention`, in NumPy and with every feature of the oracle. Its
errors against the oracle bound a kernel's; `tests/kernels/test_contract.py` checks that they equal
the errors of `jax.nn`.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from tests.support import oracle
from tests.support.oracle import Array, Gradients

Float = np.float32


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    cotangent: Any,
    lse_cotangent: Any = None,
    allowed: Array | None = None,
    bias: Any = None,
    scores: Sequence[oracle.ScoreRule] = (),
    sinks: Any = None,
    scale: float | None = None,
    keep: Array | None = None,
    rate: float = 0.0,
    shifts: np.random.Generator | None = None,
    mean_of: Literal["weights", "out", "rounded out"] = "weights",
) -> tuple[Array, Array, Gradients]:
    """Compute out, lse and gradients. For the arguments see `oracle.attention_gradients`.

    With `shifts` each number is rounded on a grid that is stretched at random by 1 to 2: to the
    nearest number as before, with another error of the same distribution.

    `mean_of` says from which numbers Σ p·dp is computed: "weights", or as kernels that keep none
    (Dao et al., "FlashAttention", 2022), out·dout of an "out" of rounded weights, or of the
    "rounded out" that cuDNN reads. The gradients of a query's scores then sum to a small number
    instead of 0. Neither rounds dp.
    """
    dtype = np.asarray(q).dtype

    def rounded(x: Array) -> Array:
        if shifts is None:
            return x.astype(dtype).astype(Float)
        stretch = shifts.uniform(1, 2, x.shape).astype(Float)
        return (x * stretch).astype(dtype).astype(Float) / stretch

    group = q.shape[-2] // k.shape[-2]
    scale = Float(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    q, k, v, dout = (np.swapaxes(np.asarray(x, Float), -3, -2) for x in (q, k, v, cotangent))
    k, v = (np.repeat(x, group, axis=-3) for x in (k, v))
    raw = s = q @ k.mT * scale
    for rule in scores:
        s = rule.value(s).astype(Float)
    s = s if bias is None else s + np.asarray(bias, Float)
    s = s if allowed is None else np.where(allowed, s, -np.inf)
    top = s.max(-1, keepdims=True)
    sink = None if sinks is None else np.asarray(sinks, Float)[:, None, None]
    top = top if sink is None else np.maximum(top, sink)
    top = np.where(np.isneginf(top), Float(0), top)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True) + (0 if sink is None else np.exp(sink - top))
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    p = p / np.where(total == 0, Float(1), total)
    weights = rounded(oracle.dropped(p, keep, rate))
    out = weights @ v
    rounded_out, dp = rounded(out), dout @ v.mT
    dp = oracle.dropped(rounded(dp) if mean_of == "weights" else dp, keep, rate).astype(Float)
    read = rounded_out if mean_of == "rounded out" else out
    mean = (p * dp if mean_of == "weights" else read * dout).sum(-1, keepdims=True)
    if lse_cotangent is not None:
        mean = mean - np.asarray(lse_cotangent, Float)[..., None]
    ds = p * (dp - mean)
    dsinks = None
    if sinks is not None:
        weight = np.exp(sink - np.where(total == 0, Float(0), lse))
        dsinks = -(weight * mean)[..., 0].sum(-1).reshape(-1, len(sinks)).sum(0)
    draw, dscores = oracle.pulled_back(scores, raw, ds)
    dq, dk, dv = draw @ k * scale, draw.mT @ q * scale, weights.mT @ dout
    dq, dk, dv = (np.swapaxes(x, -3, -2) for x in (dq, dk, dv))
    dk, dv = (oracle.grouped(x, group) for x in (dk, dv))
    gradients = [rounded(x) for x in (dq, dk, dv)]
    return np.swapaxes(rounded_out, -3, -2), lse[..., 0], Gradients(*gradients, ds, dsinks, dscores)
