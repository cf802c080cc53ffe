"""The meaning of the other kernels: plain einsums, a float32 softmax, every feature.

Memory grows with T·S. Gradients of any order come from JAX.
"""

import jax
import jax.numpy as jnp

from flax_mha.kernels.spec import AttentionSpec


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
    N = q.shape[-2]
    poison = None
    if spec.mask is not None:
        q, (k, v), poison = _isolate(q, k, v)
    logits = _scores(q, k, spec, poison)
    # Any finite shift gives the same weights; the maximum of an empty row is not finite.
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf))
    top = jnp.where(top == -jnp.inf, 0.0, top)
    unnormalized = jnp.exp(logits - top)
    total = jnp.sum(unnormalized, axis=-1, keepdims=True)
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(total))

    kept = spec.drop(unnormalized).astype(v.dtype)
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
    return jnp.exp(_scores(q, k, spec, poison) - lse[..., None])


def _scores(q: jax.Array, k: jax.Array, spec: AttentionSpec, poison: jax.Array | None) -> jax.Array:
    """The scores [*B, N, T, S] in float32 at least; −∞ where the mask forbids."""
    # Softmax in float32: bfloat16 has 8 significand bits, too few for long sums.
    dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    logits = jnp.einsum(
        "...tnh,...snh->...nts", q, _per_head(k, q.shape[-2]),
        precision=spec.precision, preferred_element_type=dtype,
    )  # fmt: skip
    logits = logits * jnp.asarray(spec.scale, dtype)
    if spec.bias is not None:
        logits = logits + spec.bias.astype(dtype)
    if poison is not None:
        logits = logits + poison.astype(dtype)
    allowed = spec.allowed()
    return logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)


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
