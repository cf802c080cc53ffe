"""The meaning of the other kernels: plain einsums, a float32 softmax, every feature.

Memory grows with T·S. Gradients of any order come from JAX.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from flax_mha.base import shapes
from flax_mha.base.coordinates import At
from flax_mha.kernels.normalizers import OTHERS, SOFTMAX
from flax_mha.kernels.softmax import finfo_min, finite, move_nan_to_keys
from flax_mha.kernels.spec import AttentionSpec, Lowered, Platform

# Below every sum of exponentials but 0, for the greatest is 1; any power of its inverse, which
# derivatives take, is finite.
_LEAST_TOTAL = 0.5


def lower(
    q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, platform: Platform
) -> Lowered:
    """The call made ready; this kernel refuses none."""
    del platform
    return functools.partial(attend, q, k, v, spec)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    """Computes softmax(q·kᵀ·scale + bias, where the mask allows)·v.

    A query that may see no key gives exactly 0, with gradients of 0.

    Args:
      q: [*B, T, N, H].
      k: [*B, S, K, H].
      v: [*B, S, K, Hv].
      spec: the rest of the call.

    Returns:
      (out [*B, T, N, Hv] in the dtype of q, lse [*B, N, T] in float32: the log of the sum of the
      exponentials of the scores, −∞ where no key is seen; NaN without a softmax).
    """
    at = spec.at(shapes.Dims.of(q, k, v))
    q, k, v = heads_first(q, k, v)
    if spec.mask is not None:
        k, v = move_nan_to_keys(k, v)
    logits, allowed = scores(q, k, spec, at)
    if spec.normalizer != SOFTMAX:
        weights = OTHERS[spec.normalizer](logits, allowed)
        out = _product(weights, v, spec, at, logits.dtype)
        return jnp.swapaxes(out, -3, -2).astype(q.dtype), jnp.full(out.shape[:-1], jnp.nan)
    rounds = v.dtype != logits.dtype
    weights, top, total = _exponentials(logits, allowed, spec, shared=rounds)
    if not spec.reads_lse:
        lse = jnp.zeros(logits.shape[:-1], logits.dtype)
    elif rounds:
        # From scores of its own, the lse's gradient would be rounded by itself before it is added.
        lse = _lse(top, total)
    else:
        # From those of the output, it would change the output's last bits: XLA:CPU fuses them with
        # both products, but not where something else reads them.
        same_q, same_k = jax.lax.optimization_barrier((q, k))
        lse = _lse(*_exponentials(*scores(same_q, same_k, spec, at), spec)[1:])
    if allowed is not None or spec.scores or 0 in logits.shape:
        # Of a query that sees nothing it is 0; of any other at least 1, but for rounding.
        total = jnp.maximum(total, _LEAST_TOTAL)
    if rounds:
        # Divided before it is rounded: else the rounded gradient of the exponentials would not
        # cancel against that of their sum, which is exact, and where it matters they cancel.
        weights = weights * (1 / total)
        weights = weights if allowed is None else jnp.where(allowed, weights, 0.0)
    out = _product(weights, v, spec, at, total.dtype)
    # After the product there is less to divide.
    out = out if rounds else out / total
    # Nor may what is asked of a query that sees nothing. (A sum that is read twice is not fused;
    # where scores can't be −∞, the mask knows as well.)
    if spec.scores:
        out = jnp.where(jnp.sum(weights, axis=-1, keepdims=True) == 0, 0.0, out)
    elif allowed is not None:
        out = jnp.where(jnp.any(allowed, axis=-1, keepdims=True), out, 0.0)
    return jnp.swapaxes(out, -3, -2).astype(q.dtype), lse


def _exponentials(
    logits: jax.Array, allowed: jax.Array | None, spec: AttentionSpec, shared: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """exp(logits − top), 0 where masked; top [*B, N, T, 1], the greatest; and their sum.

    Shared by output and lse, they are compiled alike whether the lse is read or not.
    """
    top = jnp.max(logits, axis=-1, keepdims=True, initial=finfo_min(logits.dtype))
    if spec.sinks is not None:
        sinks = shapes.lead(spec.sinks.astype(logits.dtype)[:, None, None], logits.ndim)
        top = jnp.maximum(top, sinks)
    # Any shift gives the same weights.
    top = jax.lax.stop_gradient(top)
    top = jax.lax.optimization_barrier(top) if shared else top
    weights = jnp.exp(logits - top) if allowed is None else _masked_exp(logits - top, allowed)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights, top, total if spec.sinks is None else total + jnp.exp(sinks - top)


@jax.custom_jvp
def _masked_exp(x: jax.Array, allowed: jax.Array) -> jax.Array:
    """exp(x), 0 where masked. It is its own derivative, so gradients need nothing else kept."""
    # A product: XLA:CPU fuses it, unlike a select, with the products of matrices.
    return jnp.exp(x) * allowed.astype(x.dtype)


@_masked_exp.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    weights = _masked_exp(*primals)
    return weights, weights * tangents[0]


def _lse(top: jax.Array, total: jax.Array) -> jax.Array:
    """[*B, N, T] of `_exponentials`."""
    empty = total == 0
    return jnp.where(empty, -jnp.inf, top + jnp.log(jnp.where(empty, 1.0, total)))[..., 0]


def _product(
    weights: jax.Array, v: jax.Array, spec: AttentionSpec, at: At, dtype: Any
) -> jax.Array:
    """Weights, after dropout, times values."""
    kept = spec.apply_dropout(weights, at).astype(v.dtype)
    out = jnp.matmul(kept, v, precision=spec.precision, preferred_element_type=dtype)
    return spec.scale_kept(out)


def heads_first(q: jax.Array, *keyed: jax.Array) -> list[jax.Array]:
    """[*B, T, N, ·] as [*B, N, T, ·], with keys and values repeated to one for each query head.

    XLA:CPU is twice as slow where the products themselves have to transpose, and slow at products
    over groups of heads, at any group size: a copy of S·N·H costs less.
    """

    def repeated(x: jax.Array) -> jax.Array:
        group = q.shape[-2] // x.shape[-2]
        # In float32, for that is how the gradients of the copies are summed.
        return x if group == 1 else jnp.repeat(x.astype(wide), group, -2).astype(x.dtype)

    wide = shapes.wide(q.dtype)
    return [jnp.swapaxes(x, -3, -2) for x in (q, *map(repeated, keyed))]


def scores(
    q: jax.Array, k: jax.Array, spec: AttentionSpec, at: At
) -> tuple[jax.Array, jax.Array | None]:
    """The scores [*B, N, T, S] in float32 at least, and where the mask allows (None: everywhere).

    Where it forbids stands the least number: not −∞, which `jax_debug_infs` would find.

    Args:
      q: [*B, N, T, H].
      k: [*B, N, S, H].
      spec: of the call.
      at: where its grids stand.
    """
    dtype = shapes.wide(q.dtype)
    if q.dtype == dtype:
        q = q * jnp.asarray(spec.scale, dtype)
    product = multiplied if spec.mask is None else isolated
    logits = product(q, k, spec.precision, dtype)
    if q.dtype != dtype:
        # Half precision would round q once more.
        logits = logits * jnp.asarray(spec.scale, dtype)
    vectors = None
    if spec.vectors:
        wide = q if q.dtype == dtype else q.astype(dtype) * jnp.asarray(spec.scale, dtype)
        wide, k = (x if spec.mask is None else finite(x) for x in (wide, k))
        vectors = wide, k.astype(dtype)
    return spec.apply(logits, at, finfo_min(dtype), vectors)


def multiplied(q: jax.Array, k: jax.Array, precision: Any, dtype: Any) -> jax.Array:
    """q·kᵀ [*B, N, T, S] in that dtype."""
    return jnp.matmul(q, jnp.swapaxes(k, -1, -2), precision=precision, preferred_element_type=dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def isolated(q: jax.Array, k: jax.Array, precision: Any, dtype: Any) -> jax.Array:
    """As `multiplied`, with a derivative that takes what is not finite in q and k for 0.

    The gradient of a masked score is 0, and 0·NaN is NaN.
    """
    return multiplied(q, k, precision, dtype)


@isolated.defjvp
def _(precision: Any, dtype: Any, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (q, k), (dq, dk) = primals, tangents
    tangent = multiplied(dq, finite(k), precision, dtype)
    tangent += multiplied(finite(q), dk, precision, dtype)
    return isolated(q, k, precision, dtype), tangent
