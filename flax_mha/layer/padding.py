"""Tokens that are none: what fills the rows of a batch up to one length."""

from typing import Any

import jax
import jax.numpy as jnp

from flax_mha import sharding
from flax_mha.base import shapes


def cleared(x: Any, lengths: Any, order: Any = None) -> Any:
    """Features with 0 in place of padding, so that nothing of it can spread.

    A mask would keep it from outputs, but not from gradients: that of a projection multiplies all
    its inputs, and 0·NaN is NaN.

    Args:
      x: [*B, T, D].
      lengths: int [*B], how many tokens of each row are real; None for all.
      order: int [T], where the tokens stand; None for 0 … T−1.
    """
    if lengths is None:
        return x
    shapes.check_features("x", x)
    lengths = jnp.asarray(shapes.per_row("lengths", lengths, x.shape[:-2], x.shape[-2]))
    tokens = x.shape[-2]
    order = jnp.arange(tokens) if order is None else jnp.asarray(shapes.check_order(order, tokens))

    def clear(x: jax.Array, lengths: jax.Array, order: jax.Array) -> jax.Array:
        real = shapes.lead(order, x.ndim - 1) < lengths[..., None]
        return jnp.where(real[..., None], x, jnp.zeros_like(x))

    # Without names the result lies as x does.
    return sharding.auto(clear, (), x, lengths, order)


def cleared_inputs(q: Any, k: Any, v: Any, lengths: Any, order: Any) -> tuple[Any, ...]:
    """A layer's inputs, cleared where they are tokens of inputs_q; see `cleared`."""
    real = cleared(q, lengths, order)
    if k is not q:
        return real, k, v
    # One array stays one: its projections are one product.
    return real, real, real if v is q else cleared(v, lengths, order)
