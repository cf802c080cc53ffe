"""The meaning of the other kernels: plain einsums, a float32 softmax, every feature.

Memory grows with T·S. Gradients of any order come from JAX.
"""

import jax
import jax.numpy as jnp

from flax_mha import shapes
from flax_mha.grid import At
from flax_mha.kernels.spec import AttentionSpec
from flax_mha.shapes import Dims


def refuses(
    q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, platform: str
) -> str | None:
    """The reason why this kernel can't run the call: there is none."""
    del q, k, v, spec, platform
    return None


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
      exponentials of the scores, −∞ where no key is seen).
    """
    S, K, Hv = v.shape[-3:]
    *B, T, N, _ = q.shape
    poison = None
    if spec.mask is not None:
        q, (k, v), poison = _isolate(q, k, v)
    dims = Dims(tuple(B), T, S, N, K, q.shape[-1], Hv)
    at = spec.at(dims)
    logits = _scores(q, k, spec, at, poison)
    # Any finite shift gives the same weights; the maximum of an empty row is not finite.
    top = jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf)
    if spec.sinks is not None:
        sinks = shapes.lead(spec.sinks.astype(logits.dtype)[:, None, None], logits.ndim)
        top = jnp.maximum(top, sinks)
    top = jax.lax.stop_gradient(top)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    unnormalized = jnp.exp(logits - top)
    total = jnp.sum(unnormalized, axis=-1, keepdims=True)
    if spec.sinks is not None:
        total = total + jnp.exp(sinks - top)
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(total))

    kept = spec.drop(unnormalized, at).astype(v.dtype)
    out = jnp.einsum(
        "...nts,...snh->...tnh", kept, _per_head(v, N),
        precision=spec.precision, preferred_element_type=total.dtype,
    )  # fmt: skip
    out = out / jnp.swapaxes(total, -3, -2)
    return out.astype(q.dtype), lse[..., 0]


def weights(q: jax.Array, k: jax.Array, lse: jax.Array, spec: AttentionSpec) -> jax.Array:
    """The weights [*B, N, T, S] before dropout, rebuilt from any kernel's lse [*B, N, T]."""
    poison = None
    if spec.mask is not None:
        q, (k,), poison = _isolate(q, k)
    lse = jnp.where(lse == -jnp.inf, 0.0, lse)
    dims = Dims(q.shape[:-3], q.shape[-3], k.shape[-3], q.shape[-2], k.shape[-2], q.shape[-1], 0)
    return jnp.exp(_scores(q, k, spec, spec.at(dims), poison) - lse[..., None])


def _scores(
    q: jax.Array, k: jax.Array, spec: AttentionSpec, at: At, poison: jax.Array | None
) -> jax.Array:
    """The scores [*B, N, T, S] in float32 at least; −∞ where the mask forbids."""
    dtype = shapes.wide(q.dtype)
    logits = jnp.einsum(
        "...tnh,...snh->...nts", q, _per_head(k, q.shape[-2]),
        precision=spec.precision, preferred_element_type=dtype,
    )  # fmt: skip
    logits = logits * jnp.asarray(spec.scale, dtype)
    if poison is not None:
        logits = logits + poison.astype(dtype)
    return spec.apply(logits, at)


def _per_head(x: jax.Array, N: int) -> jax.Array:
    """Keys or values [*B, S, K, ·] as [*B, S, N, ·], one for each query head."""
    # A copy of S·N·H costs less than einsums over groups of heads, slow on CPU at any group size.
    G = N // x.shape[-2]
    return x if G == 1 else jnp.repeat(x, G, axis=-2)


def _isolate(q: jax.Array, *keyed: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array]:
    """Keeps what a masked pair holds from leaking through 0·NaN in the matrix products.

    Non-finite entries become 0, and their NaN moves into the scores, [*B, N, T, S]: where the
    mask allows the pair it spreads as it should, elsewhere the mask removes it.
    """
    N = q.shape[-2]

    def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        finite = jnp.isfinite(x)
        poison = jnp.where(finite.all(-1), 0.0, jnp.nan).astype(x.dtype)  # [*B, length, heads]
        return jnp.where(finite, x, jnp.zeros_like(x)), jnp.moveaxis(poison, -1, -2)

    q, poison_q = split(q)
    clean, poisons = zip(*map(split, keyed), strict=True)
    poison_k = jnp.repeat(sum(poisons[1:], poisons[0]), N // keyed[0].shape[-2], axis=-2)
    return q, clean, poison_q[..., :, None] + poison_k[..., None, :]
