"""The reference kernel: plain einsums, a float32 softmax, and every feature.

It defines the results of the other kernels. Memory grows with T·S. JAX derives gradients of any
order.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from flax_mha.base import shapes
from flax_mha.base.coordinates import At
from flax_mha.kernels.normalizers import OTHERS, SOFTMAX
from flax_mha.kernels.softmax import finfo_min, finite, move_nan_to_keys, poison
from flax_mha.kernels.spec import AttentionSpec, Lowered, Platform, Result, Sums, name_result

# Below every sum of exponentials except 0, because the maximum exponential is 1. All powers of its
# inverse, which derivatives take, are finite.
_LEAST_TOTAL = 0.5


def lower(
    q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, platform: Platform
) -> Lowered:
    """Prepare the call. This kernel supports every call."""
    del platform
    return functools.partial(attend, q, k, v, spec)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec) -> Result:
    """Compute softmax(q·kᵀ·scale + bias, where the mask allows)·v.

    q is [*B, T, N, H], k [*B, S, K, H] and v [*B, S, K, Hv]. Returns out [*B, T, N, Hv] in the
    dtype of q, and float32 sums [*B, N, T]. Fully masked queries have outputs and gradients of
    exactly 0. Without a softmax the sums are 0.
    """
    at = spec.at(shapes.Dims.of(q, k, v))
    q, k, v = heads_first(q, k, v)
    if spec.mask is not None:
        k, v = move_nan_to_keys(k, v)
    logits, allowed = scores(q, k, spec, at)
    if spec.normalizer != SOFTMAX:
        lost: Any = False if allowed is None else ~(logits < jnp.inf)
        weights = OTHERS[spec.normalizer](jnp.where(lost, 0.0, logits), allowed, spec.total)
        out = _apply_weights(weights, v, spec, at, logits.dtype)
        out = out if allowed is None else poison(out, lost.any(-1, keepdims=True), q)
        # Sums that are not read, and no NaN for `jax_debug_nans`.
        zeros = jnp.zeros(out.shape[:-1], logits.dtype)
        return name_result(jnp.swapaxes(out, -3, -2).astype(q.dtype), Sums(zeros, zeros))
    rounds = v.dtype != logits.dtype
    weights, top, total, lost = exponentials(logits, allowed, spec, shared=rounds)
    if not spec.reads_lse:
        sums = [jnp.zeros((*logits.shape[:-1], 1), logits.dtype)] * 2
    elif rounds:
        # Share the output's scores, so that the lse's gradient is added before rounding.
        sums = [top, total]
    else:
        # Recompute the scores. Sharing the output's scores would change its last bits, because
        # XLA:CPU fuses them with both matmuls only if nothing else reads them.
        same_q, same_k = jax.lax.optimization_barrier((q, k))
        _, *sums, _ = exponentials(*scores(same_q, same_k, spec, at), spec)
    if allowed is not None or spec.scores or 0 in logits.shape:
        # It is 0 for fully masked queries, and at least 1 for others, except for rounding.
        total = jnp.maximum(total, _LEAST_TOTAL)
    if rounds:
        # Divide before rounding. Otherwise the rounded gradient of the exponentials would not
        # cancel with the exact gradient of their sum.
        weights = weights * (1 / total)
        weights = weights if allowed is None else jnp.where(allowed, weights, 0.0)
    out = _apply_weights(weights, v, spec, at, total.dtype)
    # The output is smaller than the weights, so dividing it is cheaper.
    out = out if rounds else out / total
    # Fully masked queries get an output of 0, whose cotangent, perhaps NaN, is dropped. Without
    # score functions the mask finds them: XLA does not fuse a sum that is read twice.
    if spec.scores:
        out = jnp.where(jnp.sum(weights, axis=-1, keepdims=True) == 0, 0.0, out)
    elif allowed is not None:
        out = jnp.where(jnp.any(allowed, axis=-1, keepdims=True), out, 0.0)
    if lost is not None:
        out, sums[1] = poison(out, lost, q), jnp.where(lost, jnp.nan, sums[1])
    out = jnp.swapaxes(out, -3, -2).astype(q.dtype)
    return name_result(out, Sums(*(x[..., 0] for x in sums)))


def exponentials(
    logits: jax.Array, allowed: jax.Array | None, spec: AttentionSpec, shared: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Return exp(logits − top), 0 where masked, the maximum top [*B, N, T, 1], and the sum.

    The last result is True for queries that see NaN under a mask, None without a mask. Their sum is
    1, so that it does not bring NaN to masked keys. If `shared`, XLA compiles the output alike
    whether the lse is read or not.
    """
    top = jnp.max(logits, axis=-1, keepdims=True, initial=finfo_min(logits.dtype))
    if spec.sinks is not None:
        sinks = shapes.lead(spec.sinks.astype(logits.dtype)[:, None, None], logits.ndim)
        top = jnp.maximum(top, sinks)
    # The weights do not depend on the shift.
    top = jax.lax.stop_gradient(top)
    top = top if allowed is None else jnp.where(jnp.isnan(top), 0.0, top)
    top = jax.lax.optimization_barrier(top) if shared else top
    weights = jnp.exp(logits - top) if allowed is None else _masked_exp(logits - top, allowed)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    total = total if spec.sinks is None else total + jnp.exp(sinks - top)
    if allowed is None:
        return weights, top, total, None
    lost = jnp.isnan(total)
    return weights, top, jnp.where(lost, 1.0, total), lost


@jax.custom_jvp
def _masked_exp(x: jax.Array, allowed: jax.Array) -> jax.Array:
    """Return exp(x), 0 where masked. It is its own derivative, so gradients save only it.

    The derivative at NaN is 0, so that score functions get no NaN from queries that see it.
    """
    # Multiply instead of select: XLA:CPU fuses the multiplication with matmuls.
    return jnp.exp(x) * allowed.astype(x.dtype)


@_masked_exp.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    weights = _masked_exp(*primals)
    return weights, finite(weights) * tangents[0]


def _apply_weights(
    weights: jax.Array, v: jax.Array, spec: AttentionSpec, at: At, dtype: Any
) -> jax.Array:
    """Return the values weighted by the weights, after dropout."""
    kept = spec.apply_dropout(weights, at).astype(v.dtype)
    out = jnp.matmul(kept, v, precision=spec.precision, preferred_element_type=dtype)
    return spec.scale_kept(out)


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
    product = multiply if spec.mask is None else multiply_finite
    logits = product(q, k, spec.precision, dtype)
    if q.dtype != dtype:
        # Scaling q in half precision would round it once more.
        logits = logits * jnp.asarray(spec.scale, dtype)
    vectors = None
    if spec.vectors:
        wide = q if q.dtype == dtype else q.astype(dtype) * jnp.asarray(spec.scale, dtype)
        wide, k = (x if spec.mask is None else finite(x) for x in (wide, k))
        vectors = wide, k.astype(dtype)
    if spec.mask is None or not spec.scores:
        return spec.apply(logits, at, finfo_min(dtype), vectors)
    # Score functions may have a derivative of NaN at NaN.
    lost = jnp.isnan(logits)
    logits, allowed = spec.apply(jnp.where(lost, 0.0, logits), at, finfo_min(dtype), vectors)
    return jnp.where(lost & (logits != finfo_min(dtype)), jnp.nan, logits), allowed


def multiply(q: jax.Array, k: jax.Array, precision: Any, dtype: Any) -> jax.Array:
    """Return q·kᵀ [*B, N, T, S] in a dtype."""
    return jnp.matmul(q, jnp.swapaxes(k, -1, -2), precision=precision, preferred_element_type=dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def multiply_finite(q: jax.Array, k: jax.Array, precision: Any, dtype: Any) -> jax.Array:
    """Return q·kᵀ, with a derivative that replaces values of q and k that are not finite by 0.

    The gradient of a masked score is 0, and 0·NaN is NaN.
    """
    return multiply(q, k, precision, dtype)


@multiply_finite.defjvp
def _(precision: Any, dtype: Any, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (q, k), (dq, dk) = primals, tangents
    tangent = multiply(dq, finite(k), precision, dtype)
    tangent += multiply(finite(q), dk, precision, dtype)
    return multiply_finite(q, k, precision, dtype), tangent
