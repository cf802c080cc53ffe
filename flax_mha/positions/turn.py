"""Rotations of pairs of features that a kernel can apply."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha import sharding
from flax_mha.base.coordinates import Array, ScoreArray
from flax_mha.base.shapes import lead
from flax_mha.base.trees import Struct


class Turn(Struct):
    """A rotation of the first 2·P features of each token by an angle for each pair.

        y₁ = x₁·cos − x₂·sin;   y₂ = x₂·cos + x₁·sin

    Other features keep their values.

    Attributes:
      x: queries or keys [*B, T, N, H] that are not rotated yet, or None.
      cos: the cosines of the angles, float [*B|1, 1, T, P].
      sin: their sines.
      interleaved: True for pairs (0, 1), (2, 3), …, else (0, P), (1, P + 1), …
    """

    x: Any
    cos: ScoreArray
    sin: ScoreArray
    interleaved: bool = struct.field(pytree_node=False)

    @classmethod
    def of(cls, x: jax.Array, theta: jax.Array, interleaved: bool, size: float) -> "Turn":
        """Return x [*B, T, N, H] and its rotation by angles [*B|1, T, P], multiplied by `size`."""

        def tables(theta: jax.Array) -> list[jax.Array]:
            theta = theta[..., None, :, :]
            return [f(theta) if size == 1 else size * f(theta) for f in (jnp.cos, jnp.sin)]

        cos, sin = sharding.auto(tables, [(), ()], lead(theta, x.ndim - 1))
        return cls(x, ScoreArray(cos), ScoreArray(sin), interleaved)

    @property
    def shape(self) -> Any:
        """The shape of x."""
        return self.x.shape

    def tables(self, features: int) -> list[Array]:
        """Return c and s of y = x·c + partner(x)·s for each feature, [*B|1, 1, T, H].

        partner(x) swaps the two features of each pair.
        """
        cos, sin = self.cos.array, self.sin.array
        rest = [(0, 0)] * (cos.ndim - 1) + [(0, features - 2 * cos.shape[-1])]

        def join(*pair: Array) -> jax.Array:
            if self.interleaved:
                return jnp.stack(pair, -1).reshape(*cos.shape[:-1], -1)
            return jnp.concatenate(pair, -1)

        pairs = (join(cos, cos), 1), (join(-sin, sin), 0)
        return [jnp.pad(x, rest, constant_values=c) for x, c in pairs]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Rotate x [*B, T, N, H], computed in the dtype of the angles."""
        H, R = x.shape[-1], 2 * self.cos.array.shape[-1]
        cos, sin = (lead(jnp.swapaxes(table, -3, -2), x.ndim) for table in self.tables(H))
        at = np.arange(H)
        at[:R] = at[:R] ^ 1 if self.interleaved else np.roll(at[:R], R // 2)
        # A product with a permutation is exact.
        partner = jnp.einsum(
            "...h,hg->...g", x, jnp.asarray(np.eye(H, dtype=np.float32)[at], x.dtype),
            precision="highest", preferred_element_type=cos.dtype,
        )  # fmt: skip
        return (x.astype(cos.dtype) * cos + partner * sin).astype(x.dtype)


def split(q: Any, k: Any) -> tuple[Any, Any, tuple[Turn, Turn] | None]:
    """Return q and k as arrays, and their rotations if they are `Turn`, or else None."""
    if isinstance(q, Turn) and isinstance(k, Turn):
        return q.x, k.x, (q.replace(x=None), k.replace(x=None))
    return q, k, None


def settle(tree: Any) -> Any:
    """Rotate the arrays of a tree that are not rotated yet."""
    return jax.tree.map(
        lambda x: x(x.x) if isinstance(x, Turn) else x, tree,
        is_leaf=lambda x: isinstance(x, Turn),
    )  # fmt: skip
