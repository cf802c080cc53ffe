"""Dot-product attention, computed by a kernel that suits the call.

A call is checked and brought into one form (`call.bind`, `call.spec`), sharded over the mesh
(`mesh.shards`), and computed by the first kernel that supports it (`choose`). `xla.reference` has
the function that all kernels compute. The first call loads the mesh, and its kernel.
"""

from collections.abc import Sequence
from typing import Any, Unpack

import jax

from flax_mha import masks
from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import Array
from flax_mha.kernels import choose
from flax_mha.kernels.call.bind import Keyed, Options, bind_call
from flax_mha.kernels.call.capture import Capture, as_capture
from flax_mha.kernels.call.normalizers import SOFTMAX
from flax_mha.kernels.call.spec import AttentionSpec
from flax_mha.kernels.call.stored import Stored, dequantize
from flax_mha.kernels.choose import KERNELS, Explanation
from flax_mha.kernels.using import resolve, use
from flax_mha.masks.algebra import count_known
from flax_mha.scores import ScoreMod
from flax_mha.sharding.devices import Platform

__all__ = [
    "KERNELS", "Capture", "Explanation", "Platform", "dot_product_attention", "explain", "use",
]  # fmt: skip
__dir__ = __all__.copy

_WEIGHTS = Capture(("weights",))


def dot_product_attention(
    q: Array,
    k: Keyed,
    v: Keyed,
    *,
    mask: masks.MaskLike | None = None,
    bias: Array | None = None,
    scores: Sequence[ScoreMod] = (),
    sinks: Array | None = None,
    scale: float | Array | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    broadcast_dropout: bool = False,
    q_positions: Array | int | None = None,
    kv_positions: Array | int | None = None,
    kernel: str = "auto",
    precision: jax.lax.PrecisionLike = None,
    normalizer: str = SOFTMAX,
    return_weights: bool = False,
    return_residuals: bool = False,
    capture: Capture | None = None,
) -> Any:
    """Compute scaled dot-product attention.

        out = softmax(scores(q·kᵀ·scale) + bias, over the keys that the mask allows)·v

    A fully masked query has an output of exactly 0, with zero weights and gradients. Masked keys
    and values have no effect if they are finite; NaN in them can reach other queries of their row
    and key/value head. The softmax is computed in at least float32.

    Dimensions: B batch (any number of axes), T queries, S keys, N query heads, K key/value heads
    (N a multiple of K: query head n reads key head n // (N/K)), H head features.

    Args:
      q: [*B, T, N, H], floating point.
      k: [*B, S, K, H], floating point, or `Stored` keys of a cache, which are read in the dtype of
        q.
      v: [*B, S, K, Hv], like k. Arrays q, k and v are promoted to one dtype.
      mask: a `flax_mha.masks.Mask`, or an array of bools (or of 1 and 0) that broadcasts to [*B, N,
        T, S], True where a query may see a key. An array of two axes is [T, S], of three axes [N,
        T, S]. For a mask of keys [*B, S], pass `masks.Keys(array)`.
      bias: an array that broadcasts to [*B, N, T, S], added to the scores after `scores`.
      scores: functions of the scores, applied in order. See `flax_mha.scores`.
      sinks: [N], an extra score per head that takes weight in the softmax but has no value.
      scale: the factor of the scores (default: 1/√H).
      dropout_rate: the share of weights set to 0. The others are scaled to keep the expectation.
      dropout_rng: a JAX key, needed if dropout_rate > 0.
      broadcast_dropout: True for one dropout pattern for all batch rows and heads.
      q_positions: int [T] or [*B, T], the queries' positions for masks, scores and dropout. A
        number is the first position (default: 0). Numbers and arrays that are not traced are
        static, so that kernels can skip masked tiles.
      kv_positions: int [S] or [*B, S], the keys' positions, or the first one (default: 0).
      kernel: a kernel's name, or "auto" (see `explain`). Forward mode (`jax.jvp`) needs
        "checkpointed" or "reference", and so do most gradients of gradients. For a sequence sharded
        over a mesh, a context-parallel strategy, "ulysses", "usp", "ring" or "all_gather",
        or both, as in "ring:blockwise". On one device a strategy has no effect.
      precision: the precision of matmuls. See `jax.lax.Precision`.
      normalizer: the function from scores to weights: "softmax", "sigmoid" or "softpick". See
        `flax_mha.kernels.call.normalizers`. Only the softmax has an lse and entropy to return.
      return_weights: True to also return the weights [*B, N, T, S], before dropout.
      return_residuals: True to also return lse [*B, N, T] in float32, the logarithm of the sum of
        the exponentials of the scores, −∞ for a fully masked query.
      capture: a `Capture` of values to also return in a dict, such as
        `Capture(("entropy", "max_logit"))`. The output is the same to the bit.

    Returns:
      out [*B, T, N, Hv] in the promoted dtype of q, k and v. If more is asked for, a tuple of out,
      the weights, the lse and the dict of captured values.

    Raises:
      ValueError: if shapes do not fit, or the named kernel does not support the call.
      TypeError: if a dtype is not supported.

    Sources: Vaswani et al., "Attention Is All You Need", 2017; Ainslie et al., "GQA", 2023.
    """
    import chex

    from flax_mha.kernels import observe
    from flax_mha.kernels.mesh import shards

    q, k, v, spec = bind_call(
        q, k, v, mask=mask, bias=bias, scores=scores, sinks=sinks, scale=scale,
        dropout_rate=dropout_rate, dropout_rng=dropout_rng, broadcast_dropout=broadcast_dropout,
        q_positions=q_positions, kv_positions=kv_positions, precision=precision,
        normalizer=normalizer,
    )  # fmt: skip
    checks.flag("return_weights", return_weights)
    checks.flag("return_residuals", return_residuals)
    capture = as_capture(capture)
    _check_lse(normalizer, return_residuals, capture)
    kernel, blocks = resolve(kernel)
    reads = _reads_lse(return_residuals, capture)
    if return_weights or capture:
        # Not only the kernel reads queries and keys.
        turned: tuple[jax.Array, jax.Array | Stored, AttentionSpec] = spec.turned(q, k)
        q, k, spec = turned
    call_spec = spec.replace(reads_lse=reads, exact_lse=return_residuals, blocks=blocks)
    _, name = choose.parse_kernel(kernel)
    division = shards.Division.of(q, k)
    if division is None:
        out, sums = choose.lower(name, q, k, v, call_spec).run()
    else:
        out, sums = shards.run(kernel, division, q, k, v, call_spec)
    lse = sums.lse if reads else None
    *B, T, N, _ = q.shape
    chex.assert_shape(out, (*B, T, N, v.shape[-1]))
    chex.assert_shape(sums.total, (*B, N, T))
    extras: list[Any] = []
    if return_weights:
        extras.append(observe.observe(q, dequantize(k), None, spec, _WEIGHTS)["weights"])
    if return_residuals:
        extras.append(lse)
    if capture:
        extras.append(observe.observe(q, dequantize(k), lse, spec, capture))
    return (out, *extras) if extras else out


def _reads_lse(return_residuals: bool, capture: Capture | None) -> bool:
    return return_residuals or (capture is not None and "lse" in capture.what)


def _check_lse(normalizer: str, lse: bool, capture: Capture | None) -> None:
    """Check that a call without a softmax asks for no lse and no entropy."""
    names = {"lse", "entropy"} & {*(capture.what if capture else ()), *(["lse"] if lse else [])}
    if normalizer != SOFTMAX and names:
        raise ValueError(
            f"normalizer must be 'softmax' to return {', '.join(sorted(names))}, got "
            f"{normalizer!r}; leave them out"
        )


def explain(
    q: Array | jax.ShapeDtypeStruct,
    k: Keyed | jax.ShapeDtypeStruct,
    v: Keyed | jax.ShapeDtypeStruct,
    *,
    kernel: str = "auto",
    return_weights: bool = False,
    return_residuals: bool = False,
    capture: Capture | None = None,
    platform: Platform | None = None,
    **call: Unpack[Options],
) -> Explanation:
    """Return the kernel that `dot_product_attention` would use, without running it.

    A mask that is known is computed, to count the pairs that may attend.

    Args:
      q: the queries, or their `jax.ShapeDtypeStruct`.
      k: the keys, or their `jax.ShapeDtypeStruct`.
      v: the values, or their `jax.ShapeDtypeStruct`.
      kernel: a kernel's name, a strategy, or "auto".
      return_weights: ignored, because every kernel can return the weights.
      return_residuals: True if the call also returns the lse, which `splash` has not.
      capture: the values that the call also returns. Only `splash` has no lse to capture.
      platform: the platform to explain, which may be elsewhere, such as `Platform("tpu")` or
        `Platform("gpu", "NVIDIA H200", cudnn=(9, 20, 0))` of flax_mha (default: the current one).
      **call: other arguments of `dot_product_attention`.

    Returns:
      The kernel, and the reasons against the others. `print` shows a table.

    Raises:
      ValueError, TypeError: if the call is not valid, or the kernel is unknown.
    """
    from flax_mha.kernels.mesh import shards

    checks.flag("return_weights", return_weights)
    checks.flag("return_residuals", return_residuals)
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.floating(name, x)
    capture = as_capture(capture)
    kernel, blocks = resolve(kernel)
    reads = _reads_lse(return_residuals, capture)

    def trace(q: Array, k: Keyed, v: Keyed) -> Explanation:
        q, k, v, spec = bind_call(q, k, v, **call)
        spec = spec.replace(reads_lse=reads, blocks=blocks)
        if capture:
            capture.chosen(shapes.Dims.of(q, k, v))
        return shards.explain(kernel, q, k, v, spec, platform)

    explanation: Explanation = jax.eval_shape(trace, q, k, v)
    mask = call.get("mask")
    if mask is None:
        return explanation
    positions = call.get("q_positions"), call.get("kv_positions")
    dims = shapes.Dims.of(q, k, v)
    share, no_key = count_known(masks.as_mask(mask), dims, *positions) or (None, None)
    return explanation._replace(share=share, no_key=no_key)
