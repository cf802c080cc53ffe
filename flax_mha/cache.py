"""Keys and values of the tokens so far, for decoding."""

from typing import Self

import jax
import jax.numpy as jnp
from flax import struct

from flax_mha.shapes import Shape


class KVCache(struct.PyTreeNode):
    """A cache of fixed capacity S that fills from slot 0; slot j holds the token at position j.

    Attributes:
      key: [*B, S, K, H].
      value: [*B, S, K, Hv].
      index: int32 scalar, the number of tokens appended so far. Beyond S the cache has overflowed.
    """

    key: jax.Array
    value: jax.Array
    index: jax.Array

    @classmethod
    def empty(cls, key: jax.Array, value: jax.Array) -> Self:
        """An empty cache of the shapes and dtypes of key and value."""
        return cls(jnp.zeros_like(key), jnp.zeros_like(value), jnp.zeros((), jnp.int32))

    def next_positions(self, T: int) -> jax.Array:
        """Int32 [T], the positions of the next T tokens."""
        return self.index + jnp.arange(T, dtype=self.index.dtype)

    def append(self, key: jax.Array, value: jax.Array) -> Self:
        """Adds T tokens.

        Args:
          key: [*B, T, K, H].
          value: [*B, T, K, Hv].

        Returns:
          The new cache. After an overflow its contents are undefined; `overflowed` tells.

        Raises:
          ValueError: if the tokens do not fit the cache's shape.
        """
        self._check(key.shape, self.key.shape)
        self._check(value.shape, self.value.shape)
        T = key.shape[-3]
        starts = [jnp.zeros_like(self.index)] * key.ndim
        starts[-3] = self.index
        return self.replace(
            key=jax.lax.dynamic_update_slice(self.key, key.astype(self.key.dtype), starts),
            value=jax.lax.dynamic_update_slice(self.value, value.astype(self.value.dtype), starts),
            index=self.index + T,
        )

    @property
    def overflowed(self) -> jax.Array:
        """Bool scalar: more tokens were appended than there are slots."""
        return self.index > self.key.shape[-3]

    @staticmethod
    def _check(came: Shape, slots: Shape) -> None:
        if came[:-3] != slots[:-3] or came[-2:] != slots[-2:] or came[-3] > slots[-3]:
            raise ValueError(
                f"tokens for the cache must have shape [*B, at most S, K, H] where the cache is "
                f"{slots}, got {came}; initialize the cache with the full batch and length"
            )
