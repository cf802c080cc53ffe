"""Dropout of attention weights, as a function of each weight's coordinates.

Dropout is a pure function of (key, batch row, head, query position, key position). So every kernel
drops the same weights, whatever its tiles are, and each device of a mesh computes its own part of
the dropout mask.

The function is a hash of 32-bit integers. It is cheap enough to recompute in the backward pass, and
simple enough (add, multiply, shift, xor) for any accelerator:

    a = mix(mix(row ⊕ s₀) + head)      mix(a ⊕ i) = (a_i, b_i = mix(a_i + s₁))
    bits(i, j) = mix(mix(j + a_i) ⊕ b_i)

`mix` is a bijection with good avalanche. The 64 bits (a_i, b_i) give each query its own stream, and
(s₀, s₁) come from the JAX key.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from flax_mha.base.coordinates import Array


class WeightDropout(struct.PyTreeNode):
    """The weights that a call drops, as a function of their coordinates.

    Attributes:
      seed: uint32 [2].
      rate: the probability of dropping a weight, in (0, 1).
      broadcast: True for one pattern of queries × keys for all batch rows and heads.
    """

    seed: jax.Array
    rate: float = struct.field(pytree_node=False)
    broadcast: bool = struct.field(pytree_node=False, default=False)

    @classmethod
    def from_key(cls, key: jax.Array, rate: float, broadcast: bool = False) -> "WeightDropout":
        """Draw the seed from a JAX random key."""
        return cls(jax.random.bits(key, (2,), jnp.uint32), rate, broadcast)

    def keep(self, row: Array, head: Array, q_pos: Array, k_pos: Array) -> jax.Array:
        """Return True for weights that stay.

        The indices of rows of the flattened batch and of query heads, and the positions of queries
        and keys, broadcast to the result's shape.
        """
        row, head, i, j = (x.astype(jnp.uint32) for x in (row, head, q_pos, k_pos))
        s0, s1 = self.seed[0], self.seed[1]
        if self.broadcast:
            row = head = jnp.zeros([1] * row.ndim, jnp.uint32)
        a = _mix(_mix(row ^ s0) + head)
        a = _mix(a ^ i)
        b = _mix(a + s1)
        bits = _mix(_mix(j + a) ^ b)
        return bits >= jnp.uint32(min(round(self.rate * 2**32), 2**32 - 1))

    @property
    def scale(self) -> float:
        """The factor of kept weights, which preserves their expectation."""
        return 1 / (1 - self.rate)


def _mix(x: Array) -> Any:
    """Apply a low-bias bijection of uint32 (Wellons, "Prospecting for Hash Functions", 2018)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
