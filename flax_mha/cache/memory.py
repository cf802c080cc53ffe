"""Keys and values of an encoder's tokens, which cross-attention projects once."""

from typing import Self

import jax
import jax.numpy as jnp
from flax import struct

from flax_mha.cache.slots import SCALES, SLOTS, encode, stored, take_rows
from flax_mha.kernels.stored import Stored


class Memory(struct.PyTreeNode):
    """Keys and values of all tokens of an encoder, heads first.

    Attributes:
      key: [*B, K, S, H].
      value: [*B, K, S, Hv].
      key_scale: float32 [*B, K, S], of int8 keys; else None.
      value_scale: likewise.
    """

    key: jax.Array
    value: jax.Array
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None

    @classmethod
    def of(cls, key: jax.Array, value: jax.Array, dtype: jnp.dtype) -> Self:
        """That of keys [*B, S, K, H] and values [*B, S, K, Hv], stored in that dtype."""
        arrays, scales = [], []
        for x in (key, value):
            held = encode(x, dtype)
            arrays.append(jnp.swapaxes(held.values, -3, -2))
            scale = held.scale
            scales.append(None if scale is None else jnp.swapaxes(scale[..., 0], -1, -2))
        return cls(*arrays, *scales)

    def stored(self) -> tuple[Stored, Stored]:
        """Keys and values as kernels take them, [*B, S, K, ·]."""
        return stored(self.key, self.key_scale), stored(self.value, self.value_scale)

    def fork(self, rows: jax.Array) -> Self:
        """The rows of that order, see `KVCache.fork`."""

        def take(x: jax.Array) -> jax.Array:
            return take_rows(x, rows, SLOTS if x.ndim == self.key.ndim else SCALES)

        return jax.tree.map(take, self)
