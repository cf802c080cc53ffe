"""The reference kernel: plain einsums, a float32 softmax, and every feature.

    out = dropout(softmax(scores(q·kᵀ·scale), over the keys that the mask allows, and the sink))·v

Every kernel computes this function, and says where its memory, sums or rounding differ:

- B batch axes, T queries, S keys, N query heads, K key/value heads, H and Hv features. Query head n
  reads key/value head n // (N/K).
- Score functions change q·kᵀ·scale in order, a bias last. Then the mask hides scores. Both read
  positions, which need not count from 0.
- A sink is one more score of each head, which takes weight and has no value.
- A fully masked query has weights, output and sum of exponentials 0.
- Dropout clears weights after the softmax, and scales the others to keep the expectation.
- The computation is in float32, or float64 for float64. Only the output is rounded, to q's dtype.
- Another normalizer takes the place of the softmax. It has no sums.

JAX derives all modes and orders, in memory of T·S. Some care keeps the compiled program exact:

- Matmuls read half precision. The weights are divided by their sum before they are rounded, and the
  scores are scaled after q·kᵀ, so that nothing is rounded twice.
- On CPUs, the output is divided by the sum in place of the weights, in float32.
- Barriers keep XLA from computing the pairs of static positions at compile time, and from sharing
  the output's scores with those of the lse.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from flax_mha.base import shapes, symbols
from flax_mha.base.coordinates import At
from flax_mha.kernels.call import limits
from flax_mha.kernels.call.normalizers import OTHERS, SOFTMAX
from flax_mha.kernels.call.spec import AttentionSpec, Lowered, Result, Sums, name_result
from flax_mha.kernels.xla.softmax import finfo_min

# A TPU's matrix units take 8 rows at once. Fewer go through its vector unit, which is slower.
_ROWS = {"tpu": 8}
# Below every sum of exponentials except 0, because the maximum exponential is 1.
_LEAST_TOTAL = 0.5


def lower(q: jax.Array, k: Any, v: Any, spec: AttentionSpec) -> Lowered:
    """Prepare the call. This kernel supports every call."""
    limits.check(spec, q, k, normalizers=True, vectors=True, symbolic=True)
    return Lowered(functools.partial(attend, *spec.plain(q, k, v)))


def attend(q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec) -> Result:
    """Compute softmax(q·kᵀ·scale + bias, where the mask allows)·v.

    q is [*B, T, N, H], k [*B, S, K, H] and v [*B, S, K, Hv]. Returns out [*B, T, N, Hv] in the
    dtype of q, and float32 sums [*B, N, T], which are 0 without a softmax. Fully masked queries
    have outputs and gradients of exactly 0.
    """
    at = spec.at(shapes.Dims.of(q, k, v))
    if isinstance(q, jax.core.Tracer):
        # Otherwise XLA computes the pairs of static positions while it compiles, for seconds, and
        # keeps tables of them.
        at = At(*jax.lax.optimization_barrier(tuple(at)))
    q, k, v = heads_first(q, k, v)
    logits, allowed = scores(q, k, spec, at)
    sinks = sinks_by_head(spec, logits)
    if spec.normalizer != SOFTMAX:
        weights = OTHERS[spec.normalizer](logits, allowed, spec.count)
        out = _apply_weights(weights, v, spec, at)
    else:
        weights, _, total = exponentials(logits, sinks, spec.platform.name)
        total = jnp.maximum(total, _LEAST_TOTAL)
        if v.dtype == logits.dtype and spec.platform.name == "cpu":
            # XLA:CPU divides the output in less time, because it is smaller than the weights.
            # Elsewhere the division is part of the pass that computes the weights.
            out = _apply_weights(weights, v, spec, at) / total
        else:
            # Divide before rounding. Otherwise the rounded gradient of the exponentials would not
            # cancel with the exact gradient of their sum.
            weights = weights / total
            if allowed is not None:
                # If a masked value is huge, its weight has an infinite cotangent, and 0·∞ is NaN.
                weights = jnp.where(allowed, weights, 0.0)
            out = _apply_weights(weights, v, spec, at)
        if allowed is not None:
            # Drop the cotangent of a fully masked query, which may be NaN: 0·NaN is NaN. Ask the
            # mask, because XLA:CPU is slower if something else reads the sum.
            out = jnp.where(allowed.any(-1, keepdims=True), out, 0.0)
    top = total = jnp.zeros((*logits.shape[:-1], 1), logits.dtype)
    if spec.reads_lse and spec.normalizer == SOFTMAX:
        if v.dtype == logits.dtype:
            # Recompute the scores. Sharing the output's scores would change its last bits, because
            # XLA:CPU fuses them with both matmuls only if nothing else reads them.
            same_q, same_k = jax.lax.optimization_barrier((q, k))
            logits, _ = scores(same_q, same_k, spec, at)
        _, top, total = exponentials(logits, sinks, spec.platform.name)
    out = jnp.swapaxes(out, -3, -2).astype(q.dtype)
    return name_result(out, Sums(*(jax.lax.squeeze(x, (x.ndim - 1,)) for x in (top, total))))


# Outside jit, one call in place of one per operation.
@functools.partial(jax.jit, static_argnames="platform", inline=True)
def exponentials(
    logits: jax.Array, sinks: jax.Array | None, platform: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return exp(logits − top), the maximum top [*B, N, T, 1], and the sum, with sinks."""
    # Half of finfo.min, so that masked scores have exponentials of 0 also if there are no others.
    lowest = jnp.asarray(finfo_min(logits.dtype) / 2, logits.dtype)
    fixed, axis, last = jax.lax.stop_gradient(logits), logits.ndim - 1, logits.shape[-1]
    if platform == "tpu" and not symbols.is_symbolic(last) and last != 1:
        # TPUs would read the scores once more to compare the maximum with `lowest` afterwards. XLA
        # drops the initial value of a reduction over one entry.
        top = jax.lax.reduce(fixed, lowest, jax.lax.max, (axis,))[..., None]
    else:
        # As free on CPUs and GPUs, and converters to ONNX know it.
        top = jnp.maximum(jax.lax.reduce_max(fixed, (axis,))[..., None], lowest)
    # The weights do not depend on the shift.
    top = top if sinks is None else jax.lax.stop_gradient(jnp.maximum(top, sinks))
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights, top, total if sinks is None else total + jnp.exp(sinks - top)


def sinks_by_head(spec: AttentionSpec, logits: jax.Array) -> jax.Array | None:
    """Return the sinks in the shape of scores [*B, N, T, S], or None."""
    if spec.sinks is None:
        return None
    return shapes.lead(spec.sinks.astype(logits.dtype)[:, None, None], logits.ndim)


def _apply_weights(weights: jax.Array, v: jax.Array, spec: AttentionSpec, at: At) -> jax.Array:
    """Return the values weighted by the weights, after dropout."""
    kept = spec.apply_dropout(weights, at)
    is_wide = v.dtype == weights.dtype
    if not is_wide:
        kept = spec.scale_kept(kept).astype(v.dtype)
    if spec.platform.name == "gpu":
        # XLA:GPU writes this product in the order in which the output's projection reads it.
        kept, v = (jnp.swapaxes(x, -1, -2) for x in (kept, v))
        precision: Any = spec.precision
        if isinstance(precision, tuple) and len(precision) == 2:  # of each operand
            precision = precision[::-1]
        out = jnp.swapaxes(jnp.matmul(v, kept, precision=precision), -1, -2)
    else:
        out = jnp.matmul(pad_rows(kept, spec), v, precision=spec.precision)
        out = out[..., : kept.shape[-2], :]
    return spec.scale_kept(out) if is_wide else out


def pad_rows(x: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Return x [..., T, ·] with at least the rows of a matmul on the platform, the added ones 0."""
    rows = _ROWS.get(spec.platform.name, 1)
    if not symbols.at_most(x.shape[-2], rows - 1):
        return x
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rows - x.shape[-2]), (0, 0)])


def heads_first(q: jax.Array, *keyed: jax.Array) -> list[jax.Array]:
    """Transpose [*B, T, N, ·] to [*B, N, T, ·], and repeat keys and values for each query head.

    XLA:CPU is twice as slow if the matmuls transpose, and slow for matmuls over groups of heads of
    any size. A copy of S·N·H costs less.
    """
    wide = shapes.wide(q.dtype)

    def repeat(x: jax.Array) -> jax.Array:
        group = q.shape[-2] // x.shape[-2]
        # Repeat in float32, so that the gradients of the copies are summed in float32.
        return x if group == 1 else jnp.repeat(x.astype(wide), group, -2).astype(x.dtype)

    return [jnp.swapaxes(x, -3, -2) for x in (q, *map(repeat, keyed))]


def scores(
    q: jax.Array, k: jax.Array, spec: AttentionSpec, at: At
) -> tuple[jax.Array, jax.Array | None]:
    """Return the scores of q [*B, N, T, H] and k [*B, N, S, H], and the mask or None.

    The scores [*B, N, T, S] are in at least float32. `at` holds their coordinates. Masked scores
    are finfo.min, not −∞, which `jax_debug_infs` would report.
    """
    dtype = shapes.wide(q.dtype)
    if q.dtype == dtype:
        q = q * jnp.asarray(spec.scale, dtype)
    logits = jnp.matmul(
        pad_rows(q, spec), jnp.swapaxes(k, -1, -2), precision=spec.precision,
        preferred_element_type=dtype,
    )[..., : q.shape[-2], :]  # fmt: skip
    if q.dtype != dtype:
        # Scaling q in half precision would round it once more.
        logits = logits * jnp.asarray(spec.scale, dtype)
    vectors = None
    if spec.vectors:
        wide = q if q.dtype == dtype else q.astype(dtype) * jnp.asarray(spec.scale, dtype)
        vectors = wide, k.astype(dtype)
    return spec.apply(logits, at, finfo_min(dtype), vectors)
