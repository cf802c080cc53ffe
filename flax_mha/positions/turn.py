"""Rotations of pairs of features that a kernel can apply."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha import sharding
from flax_mha.base.coordinates import ScoreArray
from flax_mha.base.shapes import lead
from flax_mha.base.trees import Struct


class Turn(Struct):
    """A rotation of the first 2·P features of each token by an angle for each pair.

        y = x·cos + partner(x)·sin

    partner(x) swaps the two features of each pair. Other features keep their values.

    Attributes:
      x: queries or keys [*B, T, N, H] that are not rotated yet, or None.
      cos: float [*B|1, 1, T, H].
      sin: float [*B|1, 1, T, H], negative for the first feature of a pair.
      pairs: P.
      interleaved: True for pairs (0, 1), (2, 3), …, else (0, P), (1, P + 1), …
    """

    x: Any
    cos: ScoreArray
    sin: ScoreArray
    pairs: int = struct.field(pytree_node=False)
    interleaved: bool = struct.field(pytree_node=False)

    @classmethod
    def of(cls, x: jax.Array, theta: jax.Array, interleaved: bool, size: float) -> "Turn":
        """Return x [*B, T, N, H] and its rotation by angles [*B|1, T, P], multiplied by `size`."""
        theta, features, P = lead(theta, x.ndim - 1), x.shape[-1], theta.shape[-1]
        is_second = np.arange(2 * P) % 2 == 1 if interleaved else np.arange(2 * P) >= P

        def tables(theta: jax.Array) -> list[jax.Array]:
            missing = [(0, 0)] * (theta.ndim - 1) + [(0, features - 2 * P)]
            cos, sin = (f(theta) if size == 1 else size * f(theta) for f in (jnp.cos, jnp.sin))
            cos, sin = (
                jnp.repeat(x, 2, -1) if interleaved else jnp.concatenate([x, x], -1)
                for x in (cos, sin)
            )
            pairs = (cos, 1), (jnp.where(is_second, sin, -sin), 0)
            return [jnp.pad(x, missing, constant_values=c)[..., None, :, :] for x, c in pairs]

        cos, sin = sharding.auto(tables, [(), ()], theta)
        return cls(x, ScoreArray(cos), ScoreArray(sin), P, interleaved)

    @property
    def shape(self) -> Any:
        """The shape of x."""
        return self.x.shape

    def swap(self, dtype: Any) -> jax.Array:
        """Return the matrix [H, H] of partner(x). A product with it is exact."""
        partner = np.arange(self.cos.array.shape[-1])
        first = partner[: 2 * self.pairs]
        partner[: 2 * self.pairs] = first ^ 1 if self.interleaved else np.roll(first, self.pairs)
        return jnp.asarray(np.eye(len(partner), dtype=np.float32)[partner], dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Rotate x [*B, T, N, H], computed in the dtype of the angles."""
        cos, sin = (
            lead(jnp.swapaxes(table.array, -3, -2), x.ndim) for table in (self.cos, self.sin)
        )
        partner = jnp.einsum("...h,hg->...g", x, self.swap(x.dtype), precision="highest",
                             preferred_element_type=cos.dtype)  # fmt: skip
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
