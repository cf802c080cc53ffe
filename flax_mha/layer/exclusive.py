"""Exclusive self-attention removes each head's output along the token's own value."""

import jax
import jax.numpy as jnp

from flax_mha import sharding
from flax_mha.base import shapes


def exclude_own(z: jax.Array, v: jax.Array) -> jax.Array:
    """Return z − (z·v / v·v)·v for each token and head, with its own value v; z if v is 0.

    Args:
      z: the heads' outputs [*B, T, N, Hv].
      v: the values of the same tokens [*B, T, K, Hv].

    Source: Zhai, "Exclusive Self Attention", 2026 (arXiv 2603.09078).
    """

    def exclude(z: jax.Array, v: jax.Array) -> jax.Array:
        wide = shapes.wide(z.dtype)
        if (group := z.shape[-2] // v.shape[-2]) > 1:
            v = jnp.repeat(v, group, axis=-2)
            if sharding.platform() == "tpu":
                # XLA:TPU writes the repeated values to memory. Without the barrier it converts them
                # first, to twice the bytes.
                v = jax.lax.optimization_barrier(v)
        y, v = z.astype(wide), v.astype(wide)
        size = (v * v).sum(-1, keepdims=True)
        has_size = size > jnp.finfo(wide).tiny
        share = (y * v).sum(-1, keepdims=True) / jnp.where(has_size, size, 1)
        return (y - jnp.where(has_size, share, 0) * v).astype(z.dtype)

    return sharding.auto(exclude, sharding.HEADS, z, v)
