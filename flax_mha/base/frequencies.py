"""Frequencies of rotations, with angles that stay exact at large positions."""

from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha.base import checks, shapes

# Below this position, angles are the float32 products position·θ, as in most implementations.
_NEAR = 4096


class Frequencies(NamedTuple):
    """The frequencies θ of pairs of features.

    A float32 product position·θ is inexact at large positions. Their angles are fractions of a turn
    in uint32, where whole turns overflow.

    Attributes:
      theta: float32 or float64 [*L, P], in radians.
      upper: the first 32 bits of the fraction of θ / 2π, uint32 [*L, P].
      lower: the next 32 bits.
    """

    theta: jax.Array
    upper: Any
    lower: Any

    @classmethod
    def of(cls, theta: np.ndarray | jax.Array, dtype: Any = None) -> Self:
        """Return the frequencies of static float64 θ, stored in `dtype`, or of traced θ."""
        if isinstance(theta, np.ndarray):
            bits = (theta / (2 * np.pi) % 1 * 2.0**64).astype(np.uint64)
            upper, lower = (bits >> np.uint64(32)), bits & np.uint64(2**32 - 1)
            theta = jnp.asarray(theta, dtype)
            return cls(theta, upper.astype(np.uint32), lower.astype(np.uint32))
        # Only the quotient is rounded, which is an error of θ, the same at all positions.
        turns = theta / (2 * np.pi) % 1 * 2.0**32
        remainder = turns % 1 * 2.0**32
        return cls(theta, turns.astype(jnp.uint32), remainder.astype(jnp.uint32))

    def angles(self, positions: Any, end: Any = None) -> jax.Array:
        """Return the angles [*P, P] of positions [*P], float32 or as wide as the positions.

        Positions are integers, or floats whose known `end`, which is above all, is near.
        """
        at = as_floats(positions)
        near = at[..., None] * shapes.lead(self.theta, at.ndim + 1)
        if end is None and checks.is_concrete(positions):
            end = np.abs(np.asarray(positions, np.float64)).max(initial=0) + 1
        if at.dtype == jnp.float64 or (end is not None and end <= _NEAR):
            return near
        whole = jnp.asarray(positions).astype(jnp.int32)[..., None]
        size = jnp.abs(whole).astype(jnp.uint32)
        upper, lower = (shapes.lead(jnp.asarray(x), at.ndim + 1) for x in (self.upper, self.lower))
        # Multiply in halves of 16 bits, because XLA's partitioner does not support `lax.mulhi`.
        # Carries below 2⁻³² of a turn are dropped.
        (p1, p0), (l1, l0) = ((x >> 16, x & 0xFFFF) for x in (size, lower))
        turns = size * upper + p1 * l1 + (p1 * l0 >> 16) + (p0 * l1 >> 16)
        # From −π to π.
        far = turns.astype(jnp.int32).astype(at.dtype) * (np.pi * 2.0**-31)
        return jnp.where(size < _NEAR, near, jnp.sign(whole).astype(at.dtype) * far)


def as_floats(positions: Any) -> jax.Array:
    """Return positions as float32, or float64 if they are."""
    at = jnp.asarray(positions)
    return at.astype(jnp.float64 if at.dtype == jnp.float64 else jnp.float32)
