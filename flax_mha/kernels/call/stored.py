"""Keys and values in the form that a cache stores."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from flax_mha.base import shapes
from flax_mha.base.shapes import Shape
from flax_mha.base.trees import Struct

# The most queries of a call that reads stored keys and values as they are, with `decode`.
QUERIES = 64


class OfLayer(struct.PyTreeNode):
    """One layer's part of an array of all layers, which is read and written without a copy.

    Attributes:
      stack: [L, ...].
      layer: the layer's index, int32.
    """

    stack: jax.Array
    layer: jax.Array

    @property
    def shape(self) -> Shape:
        """The shape of the part."""
        return self.stack.shape[1:]

    @property
    def ndim(self) -> int:
        """The number of axes of the part."""
        return self.stack.ndim - 1

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self.stack.dtype


def is_part(x: Any) -> bool:
    """Return True if x is a layer's part of an array."""
    return isinstance(x, OfLayer)


def read(x: jax.Array | OfLayer) -> jax.Array:
    """Return an array, or a layer's part of one."""
    if not isinstance(x, OfLayer):
        return x
    return jax.lax.dynamic_index_in_dim(x.stack, x.layer, keepdims=False)


def map_part(fn: Callable[[jax.Array], jax.Array], x: Any) -> Any:
    """Apply fn to an array, or to that of all layers if x is a layer's part of it."""
    return x.replace(stack=fn(x.stack)) if isinstance(x, OfLayer) else fn(x)


class Stored(Struct):
    """An array of keys or values, stored in another dtype. A kernel reads it block by block.

        x = values · scale

    Attributes:
      values: [*B, S, K, H], of the cache's dtype; or a layer's part.
      scale: float [*B, S, K, 1], the scale of each token and head; None for 1.
      dtype: the dtype that kernels read.
      slots: the logical name of S: "cache_length" for the slots of a cache, which the rules may
        shard; "length" for tokens.
    """

    values: Any
    scale: Any
    dtype: Any = struct.field(pytree_node=False)
    slots: str = struct.field(pytree_node=False, default="length")

    @property
    def shape(self) -> Shape:
        """The shape of the values."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """The number of axes of the values."""
        return self.values.ndim


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """Convert x to a floating dtype, finite numbers beyond its range to its largest."""
    largest = float(jnp.finfo(dtype).max)
    if not jnp.issubdtype(x.dtype, jnp.floating) or float(jnp.finfo(x.dtype).max) <= largest:
        return x.astype(dtype)
    # bfloat16 has no 65504, the largest number of float16.
    x = x.astype(shapes.wide(x.dtype))
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x).astype(dtype)


def dequantize(x: jax.Array | Stored) -> jax.Array:
    """Return stored keys or values as a floating-point array."""
    if not isinstance(x, Stored):
        return x
    values, scale = read(x.values), x.scale
    if scale is None:
        return cast(values, x.dtype)
    scale = read(scale)
    return cast(values.astype(scale.dtype) * scale, x.dtype)
