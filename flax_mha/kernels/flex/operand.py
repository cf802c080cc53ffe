"""The arrays of masks and scores in a kernel, and their layouts."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flax_mha.base.coordinates import ScoreArray, flat_batch, is_score_array
from flax_mha.kernels.xla.tile_plan import Plan


def flat(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a kernel's shape of an array: [1, 1] for one element, [1, n] for a vector."""
    if math.prod(shape) == 1:
        return (1, 1)
    return (1, *shape) if len(shape) == 1 else tuple(shape)


class QueryNumbers(ScoreArray):
    """Several numbers for each query, an array [*B, N, T, E]."""


class KeyNumbers(ScoreArray):
    """Several numbers for each key, an array [*B, N, S, E]."""


class Operand(NamedTuple):
    """The layout of an array of the mask or the scores in a kernel.

    Attributes:
      layout: `tile` of queries × keys, `column` of queries, `row` of keys, `one` for one number per
        row and head, `columns` for several numbers per query, `rows` for several per key, or
        `whole`.
      shape: the shape in a tile, of two axes.
      dtype: the dtype that functions see.
    """

    layout: str
    shape: tuple[int, ...]
    dtype: Any

    @property
    def is_learned(self) -> bool:
        """True if the array takes gradients."""
        return bool(jnp.issubdtype(self.dtype, jnp.floating))

    @property
    def is_table(self) -> bool:
        """True if functions look up its entries."""
        return self.layout in ("whole", "columns", "rows")

    @property
    def side(self) -> str:
        """The side that has rows of a table of its own, `q` or `k`, or an empty string."""
        return {"columns": "q", "rows": "k"}.get(self.layout, "")

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
        if isinstance(leaf, QueryNumbers):
            return cls("columns", (plan.block_q, x.shape[-1]), dtype)
        if isinstance(leaf, KeyNumbers):
            return cls("rows", (plan.block_k, x.shape[-1]), dtype)
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
        missing = plan.nq * plan.block_q - plan.dims.T, plan.nk * plan.block_k - plan.dims.S
        if self.side:
            fill = [(0, missing[self.side == "k"]), (0, 0)]
        else:
            sizes = zip(self.shape, missing, strict=True)
            fill = [(0, n if block > 1 else 0) for block, n in sizes]
        x = jnp.pad(x, [(0, 0), (0, 0), *fill], mode="edge")
        return x.swapaxes(-1, -2) if self.side or self.layout == "column" else x
