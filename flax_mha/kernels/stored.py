"""Keys and values in the form that a cache stores."""

from typing import Any

import jax
from flax import struct

from flax_mha.base.shapes import Shape
from flax_mha.base.trees import Struct


class Stored(Struct):
    """An array of keys or values, stored in another dtype. A kernel reads it block by block.

        x = values · scale

    Attributes:
      values: [*B, S, K, H], floating point or int8.
      scale: float [*B, S, K, 1], the scale of each token and head; None for 1.
      dtype: the dtype that kernels read.
      slots: the logical name of S: "cache_length" for the slots of a cache, which the rules may
        shard; "length" for tokens.
      total: the number of slots of the cache, if S is another (default: S).
    """

    values: jax.Array
    scale: jax.Array | None
    dtype: Any = struct.field(pytree_node=False)
    slots: str = struct.field(pytree_node=False, default="length")
    total: int | None = struct.field(pytree_node=False, default=None)

    @property
    def shape(self) -> Shape:
        """The shape of the values."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """The number of axes of the values."""
        return self.values.ndim


def dequantize(x: jax.Array | Stored) -> jax.Array:
    """Return stored keys or values as a floating-point array."""
    if not isinstance(x, Stored):
        return x
    if x.scale is None:
        return x.values.astype(x.dtype)
    return (x.values.astype(x.scale.dtype) * x.scale).astype(x.dtype)
