"""Flax's helpers for masks, which return rules."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype

from flax_mha.base import checks
from flax_mha.base.coordinates import Array
from flax_mha.masks.algebra import Dense, Mask, MaskLike, combine
from flax_mha.masks.per_token import AtLeast, Segments
from flax_mha.masks.positional import Causal

# The masks of functions of integers.
_OF_INTEGERS: dict[Any, Callable[[Array, Array], Mask]] = {
    jnp.equal: Segments,
    jnp.greater_equal: AtLeast,
    jnp.less: lambda q, kv: ~AtLeast(q, kv),
}


def make_causal_mask(x: Array, extra_batch_dims: int = 0, dtype: Dtype = jnp.float32) -> Mask:
    """Return `masks.Causal()`, with the signature of `flax.linen.make_causal_mask`.

    Args:
      x: [*B, T], not used.
      extra_batch_dims: not used.
      dtype: not used.
    """
    return Causal()


def make_attention_mask(
    query_input: Array, key_input: Array, pairwise_fn: Callable[..., Any] = jnp.multiply,
    extra_batch_dims: int = 0, dtype: Dtype = jnp.float32,
) -> Mask | jax.Array:  # fmt: skip
    """Return a mask of pairs of tokens, with the signature of `flax.linen.make_attention_mask`.

    | inputs | pairwise_fn | result |
    |---|---|---|
    | bools | `jnp.multiply`, `jnp.logical_and`, `jnp.bitwise_and` | `Dense` of queries & of keys |
    | integers | `jnp.equal` | `masks.Segments(query_input, key_input)` |
    | integers | `jnp.greater_equal` | `masks.AtLeast(query_input, key_input)` |
    | integers | `jnp.less` | `~masks.AtLeast(query_input, key_input)` |

    Others return the array of Flax's function.

    Args:
      query_input: [*B, T], a bool or number for each query.
      key_input: [*B, S], a bool or number for each key.
      pairwise_fn: a function of [*B, T, 1] and [*B, 1, S].
      extra_batch_dims: the number of batch axes before those of the inputs, for an array.
      dtype: the dtype of an array.
    """
    q, kv = checks.array("query_input", query_input), checks.array("key_input", key_input)
    if q.dtype == kv.dtype == bool:
        if pairwise_fn in (jnp.multiply, jnp.logical_and, jnp.bitwise_and):
            return Dense(q[..., None, :, None]) & Dense(kv[..., None, None, :])
    elif pairwise_fn in _OF_INTEGERS and _fits_int32(q.dtype) and _fits_int32(kv.dtype):
        return _OF_INTEGERS[pairwise_fn](q, kv)
    return nn.make_attention_mask(q, kv, pairwise_fn, extra_batch_dims, dtype)


def combine_masks(*masks: MaskLike | None, dtype: Dtype = jnp.float32) -> Any:
    """Join masks by `&`, skipping None, with the signature of `flax.linen.combine_masks`.

    Args:
      *masks: masks, or arrays of one rank.
      dtype: the dtype of an array.

    Returns:
      A mask, or an array if all are arrays, or None if all are None.
    """
    if any(isinstance(mask, Mask) for mask in masks):
        return combine(*masks)
    return nn.combine_masks(*masks, dtype=dtype)


def _fits_int32(dtype: Any) -> bool:
    """Tell if a dtype of integers fits into int32."""
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jnp.issubdtype(dtype, jnp.integer) and np.can_cast(dtype, np.int32)
