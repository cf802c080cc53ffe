"""Padding: the tokens beyond the length of each example."""

from typing import Any

import jax
import jax.numpy as jnp

from flax_mha import sharding
from flax_mha.base import shapes


def cleared(x: Any, lengths: Any, order: Any = None) -> Any:
    """Return x [*B, T, ·] with 0 in place of padding, by `lengths` [*B] and the `order` [T].

    A mask keeps padding from outputs, but not from gradients: the gradient of a projection
    multiplies all its inputs, and 0·NaN is NaN.
    """
    if x is None or lengths is None:
        return x
    lengths = shapes.per_row("lengths", lengths, x.shape[:-2], x.shape[-2])
    tokens = x.shape[-2]
    order = jax.lax.iota(jnp.int32, tokens) if order is None else shapes.check_order(order, tokens)

    def clear(x: jax.Array, lengths: jax.Array, order: jax.Array) -> jax.Array:
        real = shapes.lead(order, x.ndim - 1) < lengths[..., None]
        return jnp.where(real[..., None], x, jnp.zeros_like(x))

    # Without names the result is sharded like x.
    return sharding.auto(clear, (), x, lengths, jnp.asarray(order, jnp.int32))


def cleared_positions(
    positions: Any, tokens: shapes.Shape, lengths: Any, order: Any = None
) -> jax.Array:
    """Return the positions [*B, T] of tokens, with 0 in place of padding."""
    positions = jnp.broadcast_to(shapes.per_token("positions", positions, tokens), tokens)
    return cleared(positions[..., None], lengths, order)[..., 0]
