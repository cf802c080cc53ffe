"""The number format of a cache's keys and values: its dtype, and the scales of 8 bits."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax

from flax_mha.base import checks
from flax_mha.kernels.call.stored import cast

# The magnitude that the largest number of a token and head is scaled to.
_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


@dataclasses.dataclass(frozen=True)
class Format:
    """The number format of stored keys and values.

    Attributes:
      dtype: a floating dtype of 16 bits or more, or one of 8 bits that has scales.
    """

    dtype: jnp.dtype

    @classmethod
    def checked(cls, name: str, dtype: Any) -> Self:
        """Return the format of a dtype, the argument `name` of a public function."""
        return cls(checks.dtype(name, dtype, tuple(_LARGEST)))

    @property
    def largest(self) -> float | None:
        """The magnitude that scales map to, or None without scales."""
        return _LARGEST.get(self.dtype.name)

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Convert tokens [*B, T, K, F] to slots [*B, K, T, F] and scales [*B, K, T] or None.

        No finite number becomes infinite or NaN: it would reach queries that may not see it. Beyond
        the range of the dtype it becomes the largest. With scales, the slots are finite, and the
        scale of a token that is not is NaN. In int8, |x − slots·scale| ≤ max|x| / 254.
        """
        x = jnp.swapaxes(x, -3, -2)
        if self.largest is None:
            return cast(x, self.dtype), None
        x = cast(x, jnp.float32)
        most = jnp.max(jnp.abs(x), axis=-1)
        scale = jnp.where(jnp.isfinite(most), most / self.largest, jnp.nan)
        steps = finite(x / jnp.where(scale > 0, scale, 1.0)[..., None])
        steps = jnp.clip(steps, -self.largest, self.largest)
        steps = jnp.round(steps) if self.dtype == jnp.int8 else steps
        return steps.astype(self.dtype), scale


def finite(x: jax.Array) -> jax.Array:
    """Replace values of x that are not finite by 0."""
    return lax.select(lax.is_finite(x), x, lax.full_like(x, 0))


def nan_flag(x: jax.Array) -> jax.Array:
    """Return 0 for each slice of x over its last axis that is finite, NaN for the others."""
    # A matmul, because XLA:CPU is far slower at sums, and at `all`, over a short last axis.
    zeros, last = lax.full(x.shape[-1:], 0, x.dtype), x.ndim - 1
    return lax.dot_general(lax.stop_gradient(x), zeros, (((last,), (0,)), ((), ())))
