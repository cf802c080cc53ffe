"""The gradients of learned arrays of masks and scores, in kernels for Hopper.

A score's derivative with respect to an array over the scores is a tile. With respect to an entry of
a table it is a tile too, which is not 0 where the score reads this entry. Entries are taken a few
at a time.
"""

import math
from collections.abc import Sequence
from typing import Any

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
from flax_mha.kernels.flex.passes import Arrays
from flax_mha.kernels.flex.tile import FlexCall, Tile
from flax_mha.kernels.xla import softmax
from flax_mha.kernels.xla.softmax import finite
from flax_mha.masks import EMPTY

# The entries of a table whose gradients are summed together, in registers.
CHUNK = 16


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
    # With keys of its own, each query head has a block of the grid of its own.
    x = x._replace(k=jnp.repeat(x.k, dims.G, 1), v=jnp.repeat(x.v, dims.G, 1))
    call = call._replace(plan=call.plan._replace(dims=dims._replace(K=dims.N)))
    if operand.layout == "tile":
        return _sum_tiles(call, x, n, dout, stats)
    if operand.side:
        return _sum_numbers(call, x, n, dout, stats)
    if operand.layout == "whole":
        return _sum_entries(call, x, n, dout, stats)
    found = _pass(call, x, n, dout, stats)
    found = found if operand.layout != "one" else found.sum(-1, keepdims=True)
    axes = tuple(axis for axis in (0, 1) if leaf.shape[axis] == 1)
    return found.sum(axes, keepdims=True)


def _sum_entries(call: FlexCall, x: Arrays, n: int, dout: jax.Array, stats: jax.Array) -> jax.Array:
    """Return the gradient of a table. Each row and head has sums for the entries that it reads."""
    shape, closed = x.leaves[n].shape, call.closed[call.num_plain :]
    axes = tile_axes(call.masked, [*closed, *call.leaves], len(closed) + n, shape)
    others = [axis for axis in range(len(shape)) if axis not in axes]
    count = math.prod(shape[axis] for axis in axes)

    def some(first: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = _pass(call, x, n, dout, stats, (axes, first))
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


def _sum_numbers(call: FlexCall, x: Arrays, n: int, dout: jax.Array, stats: jax.Array) -> jax.Array:
    """Return the gradient of several numbers for each query or key, [R, N, E, T′ | S′]."""
    R, N, E, length = x.leaves[n].shape

    def some(first: jax.Array) -> jax.Array:
        return _pass(call, x, n, dout, stats, ((1,), first))

    found = lax.map(some, jnp.arange(0, E, CHUNK, dtype=jnp.int32))
    return jnp.moveaxis(found, 0, 2).reshape(R, N, -1, length)[:, :, :E]


def _sum_tiles(call: FlexCall, x: Arrays, n: int, dout: jax.Array, stats: jax.Array) -> jax.Array:
    """Return the gradient of a leaf of queries × keys, in memory of its size.

    Rows and heads that share it are taken one after the other.
    """
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
        found = _pass(call, here, n, part(dout, at), part(stats, at))
        # Nothing was written to empty tiles.
        is_visited = jnp.repeat(jnp.repeat(states > EMPTY, BLOCK, -1), BLOCK, -2)
        return total + jnp.where(is_visited, found, 0.0)

    return lax.fori_loop(0, counts[0] * counts[1], add, jnp.zeros(leaf.shape, jnp.float32))


def _pass(
    call: FlexCall, x: Arrays, n: int, dout: jax.Array, stats: jax.Array, entries: Any = None
) -> jax.Array:
    """Return the gradient of a leaf for each row and head: [R, N, 1 | T′, S′], or of some entries.

    The gradient of one number is summed over the keys of each query, [R, N, 1, T′]. `entries` has
    axes of a table and the number of a first entry along them. Then there are `CHUNK` such sums,
    and the indices along the other axes: [R, N, CHUNK + others, T′].
    """
    q, k, v, dout = map(padded, (x.q, x.k, x.v, dout))
    operand = call.leaves[n]
    layout, shape = operand.layout, operand.shape
    by_query = layout not in ("row", "rows")
    size = size_of(BACKWARD, max(q.shape[-1], v.shape[-1]), call)
    axes, first = entries or ((), None)
    others = 0 if operand.side else len(shape) - len(axes)
    sums = 1 if first is None else CHUNK + others

    def body(
        block: BlockTiles, start: Any, own: Any, rings: Any, buffer: Any, more: Any, outputs: Any
    ) -> None:
        def step(masked: bool, number: Any, g: Any, other: Any, carry: Any) -> Any:
            a, b = (ring.wait(number) for ring in rings)
            dot = multiply(own(0, other), a.transpose((1, 0)))
            dp = multiply(own(1, other), b.transpose((1, 0)))
            for ring in rings:
                ring.release(number)
            index, tangents = list[Any](), list[Any]([jnp.float32(1)])
            if first is not None:
                hot = (one_hot(shape, axes, more[1][0] + c, index) for c in range(CHUNK))
                tangents = [table._replace(side=operand.side) for table in hot]
            line, (at, axis) = more[0].at[block.r, block.h], (start, 0) if by_query else (other, 1)
            stats = [block.numbers(line.at[c], at, axis, (ROW, size.step)) for c in range(3)]
            tile = block.tile(masked, g, start, other)
            of_tile = _slopes(tile, n, tangents, dot, dp, *stats)
            if layout != "tile":
                found = [y + d.sum(-1) for y, d in zip(carry, of_tile, strict=False)]
                others = index[0] if sums > len(found) else []
                return found + [zeros(ROW) + jnp.asarray(i).astype(jnp.float32) for i in others]
            out = outputs[0].at[block.r, block.h, pl.ds(start, ROW), pl.ds(other, size.step)]
            plgpu.store(out, of_tile[0], optimized=False)
            return carry

        begin = [] if layout == "tile" else [zeros(ROW) for _ in range(sums)]
        found = block.each(step, begin)[1]
        for c, y in enumerate(found):
            out = outputs[0].at[block.r, block.h, c, pl.ds(start, ROW)]
            plgpu.store(out, y, optimized=False)

    (R, N, T), S = q.shape[:3], k.shape[2]
    last = (T, S) if layout == "tile" else (sums, T if by_query else S)
    given = ([q, dout], [k, v]) if by_query else ([k, v], [q, dout])
    more = [stats] if first is None else [stats, first[None]]
    output = jax.ShapeDtypeStruct((R, N, *last), jnp.float32)
    return run(call, x, by_query, size, "flex_dleaves", *given, more, [output], body)[0]


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
