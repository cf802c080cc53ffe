"""The frame of a kernel for Hopper: its grid, its lists of tiles, and the arrays that tiles read.

A block of the grid has one block of queries of a head, and visits tiles of keys; or one block of
keys of a key/value head, and visits tiles of queries of each of its query heads. `own` is the side
of the block, `other` the side that is visited. Blocks with the most tiles come first, because a
long one that begins last would run alone.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flax_mha.base.coordinates import Array, At
from flax_mha.kernels.flex.core import Arrays
from flax_mha.kernels.flex.hopper.fragments import Table
from flax_mha.kernels.flex.hopper.sync import COLUMNS, ROWS, TILE, Ring, producer_and_consumers
from flax_mha.kernels.flex.operand import Operand
from flax_mha.kernels.flex.tile import FlexCall, Tile
from flax_mha.kernels.tile_plan import make_visit_lists
from flax_mha.masks.tiles import is_static

# The queries and keys of a tile in the lists, and the rows of a warpgroup's matmul.
BLOCK, ROW = 128, 64
# The consumers of a block, and the registers of a consumer and the producer. All warpgroups
# together have 512 of them per thread of one warpgroup.
CONSUMERS, REGISTERS = BLOCK // ROW, (232, 40)


class Size(NamedTuple):
    """The sizes of a kernel.

    Attributes:
      step: the rows of the other side that are loaded and multiplied at a time.
      stages: the number of buffers of each ring.
    """

    step: int
    stages: int

    @property
    def width(self) -> int:
        """The columns of a product of weights: more would take more registers."""
        return min(self.step, 64)

    @property
    def transforms(self) -> tuple[Any, ...]:
        """The layout of all matrices in shared memory: a matmul's factors must have the same."""
        tiling: Any = plgpu.TilingTransform
        swizzle: Any = plgpu.SwizzleTransform
        return tiling((8, self.width)), swizzle(2 * self.width)


def hidden_zero(start: jax.Array) -> jax.Array:
    """Return 0, though the compiler does not know: no start is negative.

    It would else keep what is the same in every step in registers, which it lacks for the sums:
    the address of each part of a block, and each entry of a table.
    """
    return jnp.minimum(start, 0)


def spread(x: jax.Array, axis: int, shape: tuple[int, ...]) -> jax.Array:
    """Return a number per row (axis 0) or per column (axis 1) as a tile."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [axis]), TILE)


def zeros(*shape: int) -> jax.Array:
    """Return zeros per row or of a tile, in registers."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), TILE if len(shape) == 2 else ROWS)


def _lists(states: jax.Array, by_query: bool, group: int) -> list[jax.Array]:
    """Return the visited tiles, the numbers of full ones and of all, and the order of blocks."""
    states = states if by_query else states.swapaxes(-1, -2)
    visited, full, some = make_visit_lists(states)
    xp: Any = np if is_static(states) else jnp
    work = some
    if not by_query and some.shape[1] > 1:
        work = some.reshape(some.shape[0], -1, group, some.shape[-1]).sum(2)
    order = xp.argsort(-work, axis=-1, stable=True).astype(np.int32)
    return [jnp.asarray(x) for x in (visited, full, some, order)]


def _at(ref: Any, *index: Any) -> Any:
    """Return ref at an index, whose axes of one entry are shared."""
    return ref.at[tuple(i if n > 1 else 0 for i, n in zip(index, ref.shape, strict=False))]


class Block(NamedTuple):
    """A warpgroup's part of a block of the grid.

    Attributes:
      call: the static part of the call.
      size: the kernel's sizes.
      by_query: True if the own side is queries.
      r: the row of the batch.
      h: the own head: a query head, or a key/value head.
      i: the own block.
      lists: the references to the tables of `_lists`.
      indices: the references to the indices of rows and heads in the whole call.
      refs: the references to the arrays of masks and scores.
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
        full, some = (_at(ref, *at)[...] * self.parts for ref in self.lists[1:3])
        return full, some

    def start(self, g: jax.Array, t: jax.Array) -> jax.Array:
        """Return the first row of the other side of a step."""
        tile = lax.div(t, jnp.int32(self.parts))
        visited = _at(self.lists[0], self.r, self.query_head(g), self.i, tile)[...]
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
        """Return the part of an array that a tile reads: numbers, a tile, or a table."""

        def typed(x: Any) -> Any:
            return x != 0 if operand.dtype == jnp.bool_ else x

        if operand.layout == "whole":
            if ref.shape == (1, 1):
                return typed(ref[0, 0])
            n, zero = len(ref.shape) - 1, hidden_zero(other)
            return Table(ref.shape, lambda i: typed(ref[(*i[:n], i[n] + zero)]))
        shape, line = (ROW, self.size.step), _at(ref, self.r, n)
        if operand.layout == "one":
            return typed(line[0, 0])
        if operand.layout == "tile":
            part = line.at[pl.ds(own, ROW), pl.ds(other, self.size.step)]
            return typed(plgpu.load(part, layout=TILE, optimized=False))
        is_own = (operand.layout == "column") == self.by_query
        return typed(self.numbers(line.at[0], own if is_own else other, 0 if is_own else 1, shape))

    def numbers(self, line: Any, start: Any, axis: int, shape: tuple[int, int]) -> jax.Array:
        """Return the numbers of a line of global memory, per row or per column, as a tile."""
        part = line.at[pl.ds(start, shape[axis])]
        layout = COLUMNS if axis else ROWS
        return spread(plgpu.load(part, layout=layout, optimized=False), axis, shape)


def run(
    call: FlexCall, x: Arrays, by_query: bool, size: Size, name: str, own: Sequence[jax.Array],
    other: Sequence[jax.Array], more: Sequence[jax.Array], weights: int, outputs: Sequence[Any],
    body: Callable, interpret: Any = None,
) -> Any:  # fmt: skip
    """Run body(block, wg, own, rings, weights, more, outputs) in the consumers of each block.

    `own` and `other` are [R, ·, length, F] arrays whose blocks are loaded to shared memory, once or
    in rings. `more` are arrays in global memory. `weights` is the number of buffers [64, step].
    """
    states, group = x.states, call.plan.dims.G
    lists = _lists(states, by_query, group)
    operands = [*zip(call.closed, x.closed, strict=True), *zip(call.leaves, x.leaves, strict=True)]
    stored = [
        y.swapaxes(-1, -2) if operand.layout == "tile" and not by_query else y
        for operand, y in operands
    ]
    groups = (lists, (x.rows, x.heads), stored, own, other, more)
    R, M, length = own[0].shape[:3]
    dtype = own[0].dtype

    def kernel(*refs: Any) -> None:
        iterator: Iterator[Any] = iter(refs)
        tables, indices, arrays, mine, theirs, extra = (
            [next(iterator) for _ in group] for group in groups
        )
        outs = [next(iterator) for _ in outputs]
        blocks, barrier = [next(iterator) for _ in own], next(iterator)
        rings = [Ring(next(iterator), next(iterator), next(iterator)) for _ in other]
        buffers = [next(iterator) for _ in range(weights)]

        def here() -> Block:
            b = lax.axis_index("block")
            rank, line = lax.div(b, jnp.int32(R * M)), lax.rem(b, jnp.int32(R * M))
            r, h = lax.div(line, jnp.int32(M)), lax.rem(line, jnp.int32(M))
            i = _at(tables[3], r, h, rank)[...]
            return Block(call, size, by_query, r, h, i, tables, indices, arrays)

        def produce() -> None:
            block = here()

            def step(masked: bool, number: Any, g: Any, start: Any, carry: Any) -> Any:
                at = block.r, block.other_head(g), pl.ds(start, size.step)
                for ring, source in zip(rings, theirs, strict=True):
                    ring.fill(number, source.at[at])
                return carry

            steps, _ = block.each(step, None)
            for ring in rings:
                ring.drain(steps)

        def consume(wg: jax.Array) -> None:
            block = here()
            first = block.i * BLOCK + wg * ROW
            sources = [source.at[block.r, block.h, pl.ds(first, ROW)] for source in mine]
            loaded = [buffer.at[wg] for buffer in blocks]
            for source, buffer in zip(sources, loaded, strict=True):
                plgpu.copy_gmem_to_smem(source, buffer, barrier.at[wg])
            plgpu.barrier_wait(barrier.at[wg])

            def again(n: int, start: jax.Array) -> Any:
                return blocks[n].at[wg + hidden_zero(start)]

            body(block, first, again, rings, [y.at[wg] for y in buffers], extra, outs)

        producer_and_consumers(CONSUMERS, REGISTERS, produce, consume)

    def shared(*shape: int) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=size.transforms)

    ready = plgpu.Barrier(num_barriers=size.stages)
    free = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=size.stages)
    scratch: list[Any] = [shared(CONSUMERS, ROW, y.shape[-1]) for y in own]
    scratch.append(plgpu.Barrier(num_arrivals=len(own), num_barriers=CONSUMERS))
    for y in other:
        scratch += [shared(size.stages, size.step, y.shape[-1]), ready, free]
    scratch += [shared(CONSUMERS, ROW, size.step)] * weights
    kernel.__name__ = name
    return plgpu.kernel(
        kernel, out_type=list(outputs), scratch_types=scratch,
        grid=(R * M * (length // BLOCK),), grid_names=("block",), num_threads=CONSUMERS + 1,
        thread_name="wg", compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*(y for group in groups for y in group))  # fmt: skip


def padded(x: Array, dtype: Any = None) -> jax.Array:
    """Return [..., F] with features padded to a multiple of 64."""
    x = jnp.asarray(x, dtype)
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 64)])
