"""Keys and values as a cache stores them, read as the floats that queries are."""

from typing import Any

import jax
from flax import struct

from flax_mha.base.shapes import Shape


class Stored(struct.PyTreeNode):
    """An array of keys or values in a dtype of its own; a kernel reads it piece by piece.

        x = values · scale

    Attributes:
      values: [*B, S, K, H], floating point or int8.
      scale: float [*B, S, K, 1], of each token and head; None for 1.
      dtype: that it is read as.
    """

    values: jax.Array
    scale: jax.Array | None
    dtype: Any = struct.field(pytree_node=False)

    @property
    def shape(self) -> Shape:
        """That of the values."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """The number of their axes."""
        return self.values.ndim


def dequantize(x: jax.Array | Stored) -> jax.Array:
    """Return stored keys or values as one array of floats."""
    if not isinstance(x, Stored):
        return x
    if x.scale is None:
        return x.values.astype(x.dtype)
    return (x.values.astype(x.scale.dtype) * x.scale).astype(x.dtype)
