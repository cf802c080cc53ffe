"""The arrays of masks and scores in a kernel, and their layouts."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flax_mha.base.coordinates import flat_batch, is_score_array
from flax_mha.kernels.xla.tile_plan import Plan


def flat(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a kernel's shape of an array: [1, 1] for one element, [1, n] for a vector."""
    if math.prod(shape) == 1:
        return (1, 1)
    return (1, *shape) if len(shape) == 1 else tuple(shape)


class Operand(NamedTuple):
    """The layout of an array of the mask or the scores in a kernel.

    Attributes:
      layout: `tile` (queries × keys), `column` (queries), `row` (keys), `one` (a number for each
        row and head) or `whole`.
      shape: the two axes in a tile.
      dtype: the dtype that functions see.
    """

    layout: str
    shape: tuple[int, ...]
    dtype: Any

    @property
    def is_learned(self) -> bool:
        """True if the array takes gradients."""
        return bool(jnp.issubdtype(self.dtype, jnp.floating))

    @classmethod
    def of(cls, leaf: Any, plan: Plan) -> "Operand":
        """Describe an array over the scores, or an argument of a function."""
        over_scores = is_score_array(leaf)
        x = leaf.array if over_scores else leaf
        dtype = jnp.result_type(x)
        if jnp.issubdtype(dtype, jnp.floating):
            dtype = dtype if over_scores and dtype == jnp.bfloat16 else jnp.dtype(jnp.float32)
        elif jnp.issubdtype(dtype, jnp.integer) and dtype != jnp.uint32:
            dtype = jnp.dtype(jnp.int32)
        if not over_scores:
            return cls("whole", flat(jnp.shape(x)), dtype)
        t, s = (n > 1 for n in jnp.shape(x)[-2:])
        layout = ("tile" if s else "column") if t else "row" if s else "one"
        return cls(layout, (plan.block_q if t else 1, plan.block_k if s else 1), dtype)

    def store(self, x: Any, plan: Plan) -> jax.Array:
        """Return the array in the layout that blocks are cut from."""
        dtype = self.dtype
        if dtype == jnp.bool_ or jnp.result_type(x) == jnp.int8:
            # Memory holds no bools. Only tiles are large enough for int8 to matter.
            dtype = jnp.int8 if self.layout == "tile" else jnp.int32
        x = jnp.asarray(x).astype(dtype)
        if self.layout == "whole":
            return x.reshape(self.shape)
        x = jnp.asarray(flat_batch(x, plan.dims))
        missing = plan.padded[0] - plan.dims.T, plan.padded[1] - plan.dims.S
        fill = [(0, n if size > 1 else 0) for size, n in zip(x.shape[2:], missing, strict=True)]
        x = jnp.pad(x, [(0, 0), (0, 0), *fill], mode="edge")
        return x.swapaxes(-1, -2) if self.layout == "column" else x
