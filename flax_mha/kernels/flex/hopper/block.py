"""A block of a kernel's grid for Hopper: the tiles that it visits, and the arrays that they read.

`own` is the side of the block, queries or keys. `other` is the side whose tiles it visits.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flax_mha.base.coordinates import At
from flax_mha.kernels.flex.hopper.sync import COLUMNS, ROWS, TILE
from flax_mha.kernels.flex.operand import Operand
from flax_mha.kernels.flex.tile import FlexCall, Tile

# The queries and keys of a tile in the lists, and the rows of a warpgroup's matmul.
BLOCK, ROW = 128, 64
# The consumers of a block, and the registers of a consumer and the producer. All warpgroups
# together have 512 of them per thread of one warpgroup.
CONSUMERS, REGISTERS = BLOCK // ROW, (240, 24)


class Size(NamedTuple):
    """The sizes of a kernel.

    Attributes:
      step: the rows of the other side that are loaded and multiplied at a time.
      stages: the number of buffers of each ring.
    """

    step: int
    stages: int

    @property
    def transforms(self) -> tuple[Any, ...]:
        """The layout of all matrices in shared memory: a matmul's factors must have the same."""
        tiling: Any = plgpu.TilingTransform
        swizzle: Any = plgpu.SwizzleTransform
        width = min(self.step, 64)
        return tiling((8, width)), swizzle(2 * width)


def hidden_zero(start: jax.Array) -> jax.Array:
    """Return 0. The compiler does not see that no start is negative.

    Otherwise it would keep the address of each part of a block in registers, which it lacks for the
    sums.
    """
    return jnp.minimum(start, 0)


def spread(x: jax.Array, axis: int, shape: tuple[int, ...]) -> jax.Array:
    """Return a number per row (axis 0) or per column (axis 1) as a tile."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [axis]), TILE)


def zeros(*shape: int) -> jax.Array:
    """Return zeros per row or of a tile, in registers."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), TILE if len(shape) == 2 else ROWS)


def entry_at(ref: Any, *index: Any) -> Any:
    """Return ref at an index, whose axes of one entry are shared."""
    return ref.at[tuple(i if n > 1 else 0 for i, n in zip(index, ref.shape, strict=False))]


class BlockTiles(NamedTuple):
    """A warpgroup's part of a block of the grid.

    Attributes:
      call: the static part of the call.
      size: the kernel's sizes.
      by_query: True if the block is of queries, False if of keys.
      r: the row of the batch.
      h: the block's head: a query head, or a key/value head.
      i: the block.
      lists: references to the tables of `_lists`.
      indices: references to the indices of rows and heads in the whole call.
      refs: references to the arrays of masks and scores.
    """

    call: FlexCall
    size: Size
    by_query: bool
    r: jax.Array
    h: jax.Array
    i: jax.Array
    lists: Sequence[Any]
    indices: Sequence[Any]
    refs: Sequence[Any]

    @property
    def parts(self) -> int:
        """The number of steps of a tile."""
        return BLOCK // self.size.step

    @property
    def heads(self) -> int:
        """The number of heads of the other side."""
        return 1 if self.by_query else self.call.plan.dims.G

    def other_head(self, g: jax.Array) -> jax.Array:
        """Return the head of the other side."""
        G = jnp.int32(self.call.plan.dims.G)
        return lax.div(self.h, G) if self.by_query else self.h * G + g

    def query_head(self, g: jax.Array) -> jax.Array:
        """Return the query head."""
        return self.h if self.by_query else self.other_head(g)

    def counts(self, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the number of steps of full tiles, and of all visited ones."""
        at = self.r, self.query_head(g), self.i
        full, some = (entry_at(ref, *at)[...] * self.parts for ref in self.lists[1:3])
        return full, some

    def start(self, g: jax.Array, t: jax.Array) -> jax.Array:
        """Return the first row of the other side of a step."""
        tile = lax.div(t, jnp.int32(self.parts))
        visited = entry_at(self.lists[0], self.r, self.query_head(g), self.i, tile)[...]
        return visited * BLOCK + lax.rem(t, jnp.int32(self.parts)) * self.size.step

    def each(self, step: Callable, carry: Any) -> Any:
        """Return the carry after step(masked, number, g, start of other, carry) for all steps."""

        def head(g: jax.Array, carry: Any) -> Any:
            base, carry = carry
            full, some = self.counts(g)
            bounds = ((jnp.int32(0), full), (full, some))
            for masked, (first, last) in enumerate(bounds):
                if self.call.states[masked]:

                    def one(t: jax.Array, carry: Any, masked: bool = bool(masked)) -> Any:
                        return step(masked, base + t, g, self.start(g, t), carry)

                    carry = lax.fori_loop(first, last, one, carry)
            return base + some, carry

        if self.heads == 1:
            return head(jnp.int32(0), (jnp.int32(0), carry))
        return lax.fori_loop(0, self.heads, head, (jnp.int32(0), carry))

    def tile(self, masked: bool, g: jax.Array, own: jax.Array, other: jax.Array) -> Tile:
        """Return the tile of scores from these first rows of both sides."""
        shape, n = (ROW, self.size.step), self.query_head(g)
        first = (own, other) if self.by_query else (other, own)
        axes = (0, 1) if self.by_query else (1, 0)
        q, k = (
            plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=TILE) + start
            for axis, start in zip(axes, first, strict=True)
        )
        operands = (*self.call.closed, *self.call.leaves)
        pairs = zip(operands, self.refs, strict=True)
        values = [self._read(operand, ref, n, own, other) for operand, ref in pairs]
        row, head = self.indices[0][self.r], self.indices[1][n]
        return Tile.of(self.call, masked, values, At(row, head, q, k))

    def _read(self, operand: Operand, ref: Any, n: Any, own: Any, other: Any) -> Any:
        """Return the part of an array that a tile reads: a number or a tile."""
        shape = ROW, self.size.step
        line = ref if operand.layout == "whole" else entry_at(ref, self.r, n)
        if operand.layout in ("whole", "one"):
            x = line[0, 0]
        elif operand.layout == "tile":
            part = line.at[pl.ds(own, ROW), pl.ds(other, self.size.step)]
            x = plgpu.load(part, layout=TILE, optimized=False)
        else:
            is_own = (operand.layout == "column") == self.by_query
            x = self.numbers(line.at[0], *((own, 0) if is_own else (other, 1)), shape)
        return x != 0 if operand.dtype == jnp.bool_ else x.astype(operand.dtype)

    def numbers(self, line: Any, start: Any, axis: int, shape: tuple[int, int]) -> jax.Array:
        """Return the numbers of a line of global memory, per row or per column, as a tile."""
        part = line.at[pl.ds(start, shape[axis])]
        layout = COLUMNS if axis else ROWS
        return spread(plgpu.load(part, layout=layout, optimized=False), axis, shape)
