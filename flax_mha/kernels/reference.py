"""The meaning of the other kernels: plain einsums, a float32 softmax, every feature.

Memory grows with T·S. Gradients of any order come from JAX.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from flax_mha import shapes
from flax_mha.grid import At
from flax_mha.kernels.finite import finite, least, poison
from flax_mha.kernels.normalizers import OTHERS, SOFTMAX
from flax_mha.kernels.platform import Platform
from flax_mha.kernels.spec import AttentionSpec, Lowered


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
    at = spec.at(shapes.attention_dims(q, k, v))
    q, k, v = heads_first(q, k, v)
    nan: tuple[jax.Array, ...] = ()
    if spec.mask is not None:
        q, (k, v), nan = isolate(q, k, v)
    logits, allowed = scores(q, k, spec, at, nan)
    if spec.normalizer != SOFTMAX:
        weights = OTHERS[spec.normalizer](logits, allowed)
        out = _product(weights, v, spec, at, logits.dtype)
        return jnp.swapaxes(out, -3, -2).astype(q.dtype), jnp.full(out.shape[:-1], jnp.nan)
    top = jnp.max(logits, axis=-1, keepdims=True, initial=least(logits.dtype))
    if spec.sinks is not None:
        sinks = shapes.lead(spec.sinks.astype(logits.dtype)[:, None, None], logits.ndim)
        top = jnp.maximum(top, sinks)
    # Any shift gives the same weights. The barrier keeps XLA:CPU from fusing what follows with the
    # product or not, by whether lse is asked for: outputs would differ in their last bit.
    top = jax.lax.optimization_barrier(jax.lax.stop_gradient(top))
    weights = jnp.exp(logits - top)
    if allowed is not None:
        # Not even the gradient of a masked weight may count, for it may be infinite.
        weights = jnp.where(allowed, weights, 0.0)
    seen = jnp.sum(weights, axis=-1, keepdims=True)
    total = seen if spec.sinks is None else seen + jnp.exp(sinks - top)
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(total))

    rounds = v.dtype != total.dtype
    if rounds:
        # Divided before it is rounded: else the rounded gradient of the exponentials would not
        # cancel against that of their sum, which is exact, and where it matters they cancel.
        weights = weights * (1 / total)
        weights = weights if allowed is None else jnp.where(allowed, weights, 0.0)
    out = _product(weights, v, spec, at, total.dtype)
    # After the product there is less to divide.
    out = out if rounds else out / total
    # Nor may what is asked of a query that sees nothing.
    out = jnp.where(seen == 0, 0.0, out)
    return jnp.swapaxes(out, -3, -2).astype(q.dtype), lse[..., 0]


def _product(
    weights: jax.Array, v: jax.Array, spec: AttentionSpec, at: At, dtype: Any
) -> jax.Array:
    """Weights, after dropout, times values."""
    kept = spec.drop(weights, at).astype(v.dtype)
    out = jnp.matmul(kept, v, precision=spec.precision, preferred_element_type=dtype)
    return spec.gain(out)


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
    q: jax.Array, k: jax.Array, spec: AttentionSpec, at: At, nan: tuple[jax.Array, ...] = ()
) -> tuple[jax.Array, jax.Array | None]:
    """The scores [*B, N, T, S] in float32 at least, and where the mask allows (None: everywhere).

    Where it forbids stands the least number: not −∞, which `jax_debug_infs` would find.

    Args:
      q: [*B, N, T, H].
      k: [*B, N, S, H].
      spec: of the call.
      at: where its grids stand.
      nan: of `isolate`.
    """
    dtype = shapes.wide(q.dtype)
    if q.dtype == dtype:
        q = q * jnp.asarray(spec.scale, dtype)
    logits = jnp.matmul(
        q, jnp.swapaxes(k, -1, -2), precision=spec.precision, preferred_element_type=dtype
    )
    if q.dtype != dtype:
        # Half precision would round q once more.
        logits = logits * jnp.asarray(spec.scale, dtype)
    if nan:
        column, row = nan
        logits = logits + (column + row).astype(dtype)
    vectors = None
    if spec.vectors:
        wide = q if q.dtype == dtype else q.astype(dtype) * jnp.asarray(spec.scale, dtype)
        vectors = wide, k.astype(dtype)
    return spec.apply(logits, at, least(dtype), vectors)


def isolate(
    q: jax.Array, *keyed: jax.Array
) -> tuple[jax.Array, list[jax.Array], tuple[jax.Array, jax.Array]]:
    """Keeps what a masked pair holds from leaking through 0·NaN in the matrix products.

    Non-finite entries become 0, and their NaN moves into the scores, as a column [*B, N, T, 1] and
    a row [*B, N, 1, S] to be added: where the mask allows the pair it spreads as it should,
    elsewhere the mask removes it.
    """
    row = functools.reduce(operator.add, map(poison, keyed))
    return finite(q), [finite(x) for x in keyed], (poison(q)[..., None], row[..., None, :])
