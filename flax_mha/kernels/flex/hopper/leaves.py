"""The gradients of learned arrays of masks and scores, in kernels for Hopper.

A score's derivative with respect to an array over the scores is a tile. With respect to an entry of
a table it is a tile too, which is not 0 where the score reads this entry. Entries are taken a few
at a time.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flax_mha.kernels.flex.hopper.block import BLOCK, ROW, BlockTiles, zeros
from flax_mha.kernels.flex.hopper.fragments import call_with_slopes, tile_axes
from flax_mha.kernels.flex.hopper.kernels import BACKWARD, LOG2E, matrix_gradients, size_of
from flax_mha.kernels.flex.hopper.launch import padded, run
from flax_mha.kernels.flex.hopper.lazy_arrays import one_hot
from flax_mha.kernels.flex.hopper.sync import multiply
from flax_mha.kernels.flex.operand import Operand
from flax_mha.kernels.flex.passes import Arrays
from flax_mha.kernels.flex.tile import FlexCall, Tile
from flax_mha.kernels.xla import softmax
from flax_mha.kernels.xla.softmax import finite
from flax_mha.masks import EMPTY

# The entries of a table whose gradients are summed together, in registers.
CHUNK = 16
# A function from tangents of a leaf to the derivatives of the loss along them, a tile each.
Slopes: TypeAlias = Callable[[Sequence[Any]], list[jax.Array]]


def gradients(
    call: FlexCall, x: Arrays, dout: jax.Array, stats: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array | None]]:
    """Return the gradients of q, k, v and the learned leaves. See `Machine`."""
    if call.guarded:
        # Masked gradients are 0, so their factors must be finite. A visible NaN is in the sum.
        x = x._replace(q=finite(x.q), k=finite(x.k), v=finite(x.v))
    learned = [
        _leaf(call, x, n, dout, stats).astype(y.dtype) if operand.is_learned else None
        for n, (operand, y) in enumerate(zip(call.leaves, x.leaves, strict=True))
    ]
    return *matrix_gradients(call, x, dout, stats), learned


def _leaf(call: FlexCall, x: Arrays, n: int, dout: jax.Array, stats: jax.Array) -> jax.Array:
    """Return the gradient of a leaf, summed over the rows and heads that share it."""
    operand, leaf = call.leaves[n], x.leaves[n]
    dims = call.plan.dims
    # Repeat keys for each query head, so that each has its own block of the grid.
    x = x._replace(k=jnp.repeat(x.k, dims.G, 1), v=jnp.repeat(x.v, dims.G, 1))
    call = call._replace(plan=call.plan._replace(dims=dims._replace(K=dims.N)))
    of_leaf = LeafPass(call, x, n, dout, stats)
    if operand.layout == "tile":
        return _of_tiles(of_leaf)
    if operand.side:
        return _of_numbers(of_leaf)
    if operand.layout == "whole":
        return _of_table(of_leaf)
    found = _sum_rows(of_leaf)
    found = found if operand.layout != "one" else found.sum(-1, keepdims=True)
    axes = tuple(axis for axis in (0, 1) if leaf.shape[axis] == 1)
    return found.sum(axes, keepdims=True)


class LeafPass(NamedTuple):
    """The arguments of a pass for the gradient of a leaf: as of `gradients`, and its number."""

    call: FlexCall
    x: Arrays
    n: int
    dout: jax.Array
    stats: jax.Array

    @property
    def operand(self) -> Operand:
        """The layout of the leaf."""
        return self.call.leaves[self.n]

    @property
    def by_query(self) -> bool:
        """True if a block of the grid has queries, and sums are over keys."""
        return self.operand.layout not in ("row", "rows")


def _of_table(of: LeafPass) -> jax.Array:
    """Return the gradient of a table. Each row and head has sums for the entries that it reads."""
    call, x, n, *_ = of
    shape, closed = x.leaves[n].shape, call.closed[call.num_plain :]
    axes = tile_axes(call.masked, [*closed, *call.leaves], len(closed) + n, shape)
    others = [axis for axis in range(len(shape)) if axis not in axes]
    count = math.prod(shape[axis] for axis in axes)

    def some(first: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = _sum_entries(of, axes, first, len(others))
        return found[:, :, :CHUNK].sum(-1), found[:, :, CHUNK:].max(-1)

    sums, index = lax.map(some, jnp.arange(0, count, CHUNK, dtype=jnp.int32))
    R, N = sums.shape[1:3]
    sums = jnp.moveaxis(sums, 0, 2).reshape(R * N, -1)[:, :count]
    index = index[0].reshape(R * N, -1).astype(jnp.int32)
    at = [jnp.zeros(R * N, jnp.int32), *index.T]
    order = (*others, *axes)
    table = jnp.zeros((1, *(shape[axis] for axis in others), count), jnp.float32)
    table = table.at[tuple(at)].add(sums).reshape([shape[axis] for axis in order])
    return table.transpose(np.argsort(order))


def _of_numbers(of: LeafPass) -> jax.Array:
    """Return the gradient of several numbers for each query or key, [R, N, E, T′ | S′]."""
    R, N, E, length = of.x.leaves[of.n].shape

    def some(first: jax.Array) -> jax.Array:
        return _sum_entries(of, (1,), first, 0)

    found = lax.map(some, jnp.arange(0, E, CHUNK, dtype=jnp.int32))
    return jnp.moveaxis(found, 0, 2).reshape(R, N, -1, length)[:, :, :E]


def _of_tiles(of: LeafPass) -> jax.Array:
    """Return the gradient of a leaf of queries × keys, in memory of its size.

    Rows and heads that share it are taken one after the other.
    """
    call, x, n, dout, stats = of
    leaf = x.leaves[n]
    shared = [size == 1 for size in leaf.shape[:2]]
    counts = [size if alone else 1 for size, alone in zip(x.q.shape, shared, strict=False)]

    def part(y: Any, at: Sequence[Any]) -> Any:
        for axis, (start, alone) in enumerate(zip(at, shared, strict=True)):
            if alone and y.shape[axis] > 1:
                y = lax.dynamic_slice_in_dim(y, start, 1, axis)
        return y

    def add(number: Any, total: jax.Array) -> jax.Array:
        at = lax.div(number, jnp.int32(counts[1])), lax.rem(number, jnp.int32(counts[1]))
        leaves = [
            y if operand.layout == "whole" else part(y, at)
            for operand, y in zip(call.leaves, x.leaves, strict=True)
        ]
        q, k, v, states = (part(y, at) for y in (x.q, x.k, x.v, x.states))
        rows, heads = part(x.rows[:, None], at)[:, 0], part(x.heads[None], at)[0]
        here = x._replace(q=q, k=k, v=v, leaves=leaves, states=states, rows=rows, heads=heads)
        found = _store_tiles(LeafPass(call, here, n, part(dout, at), part(stats, at)))
        # Nothing was written to empty tiles.
        is_visited = jnp.repeat(jnp.repeat(states > EMPTY, BLOCK, -1), BLOCK, -2)
        return total + jnp.where(is_visited, found, 0.0)

    return lax.fori_loop(0, counts[0] * counts[1], add, jnp.zeros(leaf.shape, jnp.float32))


def _sum_rows(of: LeafPass) -> jax.Array:
    """Return the gradient of a number for each query or key, [R, N, 1, T′ | S′].

    The gradient of one number for all is summed over the keys of each query.
    """

    def add(sums: list[jax.Array], slopes: Slopes, _: Any) -> list[jax.Array]:
        (tile,) = slopes([jnp.float32(1)])
        return [sums[0] + tile.sum(-1)]

    return _each_tile(of, 1, add)


def _store_tiles(of: LeafPass) -> jax.Array:
    """Return the gradient of a leaf of queries × keys, [R, N, T′, S′], undefined in empty tiles."""

    def store(sums: list[jax.Array], slopes: Slopes, out: Any) -> list[jax.Array]:
        (tile,) = slopes([jnp.float32(1)])
        plgpu.store(out(), tile, optimized=False)
        return sums

    return _each_tile(of, 0, store)


def _sum_entries(of: LeafPass, axes: Sequence[int], first: jax.Array, others: int) -> jax.Array:
    """Return the gradients of entries of a table for each query, and where the query reads them.

    These are `CHUNK` entries from the number `first` along some axes, and the indices along the
    other axes: [R, N, CHUNK + others, T′ | S′].
    """
    shape, side = of.operand.shape, of.operand.side

    def add(sums: list[jax.Array], slopes: Slopes, _: Any, start: Any) -> list[jax.Array]:
        hot = [one_hot(shape, axes, start[0] + c, side) for c in range(CHUNK)]
        tiles = slopes([x.table for x in hot])
        found = [y + tile.sum(-1) for y, tile in zip(sums, tiles, strict=False)]
        index = hot[0].others[0] if others else []
        return found + [zeros(ROW) + jnp.asarray(i).astype(jnp.float32) for i in index]

    return _each_tile(of, CHUNK + others, add, first)


def _each_tile(
    of: LeafPass, count: int, visit: Callable[..., list[jax.Array]], *more: jax.Array
) -> jax.Array:
    """Run sums = visit(sums, slopes, out, *more) over the tiles of each row and head.

    Returns the `count` sums for each query or key, [R, N, count, T′ | S′]. Without sums, `visit`
    stores to the tile out() of the result [R, N, T′, S′]. `more` are numbers, which it reads as
    arrays [1] in global memory.
    """
    call, x, n, by_query = of.call, of.x, of.n, of.by_query
    q, k, v, dout = map(padded, (x.q, x.k, x.v, of.dout))
    size = size_of(BACKWARD, max(q.shape[-1], v.shape[-1]), call)

    def body(
        block: BlockTiles, start: Any, own: Any, rings: Any, buffer: Any, refs: Any, outputs: Any
    ) -> None:
        def step(masked: bool, number: Any, g: Any, other: Any, sums: Any) -> Any:
            a, b = (ring.wait(number) for ring in rings)
            dot = multiply(own(0, other), a.transpose((1, 0)))
            dp = multiply(own(1, other), b.transpose((1, 0)))
            for ring in rings:
                ring.release(number)

            def slopes(tangents: Sequence[Any]) -> list[jax.Array]:
                line = refs[0].at[block.r, block.h]
                at, axis = (start, 0) if by_query else (other, 1)
                stats = [block.numbers(line.at[c], at, axis, (ROW, size.step)) for c in range(3)]
                tile = block.tile(masked, g, start, other)
                return _slopes(tile, n, tangents, dot, dp, *stats)

            def out() -> Any:
                at = pl.ds(start, ROW), pl.ds(other, size.step)
                return outputs[0].at[block.r, block.h, *at]

            return visit(sums, slopes, out, *refs[1:])

        sums = block.each(step, [zeros(ROW) for _ in range(count)])[1]
        for c, y in enumerate(sums):
            line = outputs[0].at[block.r, block.h, c, pl.ds(start, ROW)]
            plgpu.store(line, y, optimized=False)

    (R, N, T), S = q.shape[:3], k.shape[2]
    last = (count, T if by_query else S) if count else (T, S)
    given = ([q, dout], [k, v]) if by_query else ([k, v], [q, dout])
    output = jax.ShapeDtypeStruct((R, N, *last), jnp.float32)
    refs = [of.stats, *(number[None] for number in more)]
    return run(call, x, by_query, size, "flex_dleaves", *given, refs, [output], body)[0]


def _slopes(
    tile: Tile, n: int, tangents: Sequence[Any], dot: jax.Array, dp: jax.Array, top: jax.Array,
    share: jax.Array, delta: jax.Array,
) -> list[jax.Array]:  # fmt: skip
    """Return the derivatives of the loss along tangents of a leaf, a tile each."""
    function, args = tile.function(dot, tile.leaves)
    s, slopes = call_with_slopes(function, args, len(function.jaxpr.constvars) + n, tangents)
    s = jnp.broadcast_to(s, dot.shape)
    p = jnp.where(s == -jnp.inf, 0.0, jnp.exp2((s - top) * LOG2E) * share)
    ds = softmax.gradient(p, tile.call.gain(tile.drop(dp)), delta)
    return [ds * slope.astype(jnp.float32) for slope in slopes]
