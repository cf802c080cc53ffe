"""The kernels of flex for Hopper: forward, and the gradients of q, k, v and leaves of floats."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flax_mha.kernels.flex.function import count_operations
from flax_mha.kernels.flex.hopper.block import BLOCK, ROW, BlockTiles, Size, spread, zeros
from flax_mha.kernels.flex.hopper.fragments import call_with_slope
from flax_mha.kernels.flex.hopper.launch import padded, run
from flax_mha.kernels.flex.hopper.sync import ROWS, add_product, multiply
from flax_mha.kernels.flex.passes import Arrays
from flax_mha.kernels.flex.tile import LN2, LOG2E, FlexCall, Tile, fill
from flax_mha.kernels.xla import softmax
from flax_mha.masks import EMPTY

# The most features of heads whose gradients of keys and values are summed together.
TOGETHER = 64
# The sizes of kernels by the features of a head.
FORWARD = {64: Size(128, 3), 128: Size(128, 2), 192: Size(32, 4), 256: Size(32, 4)}
BACKWARD = {64: Size(64, 2), 128: Size(64, 2), 192: Size(32, 2), 256: Size(32, 2)}
# These sizes are for masks and scores of at most SIMPLE operations. DOUBLE more need as many
# registers as all else. Dropout counts as DROPOUT operations. No step is below LEAST.
SIMPLE, DOUBLE, DROPOUT, LEAST = 24, 32, 24, 16


def size_of(sizes: dict[int, Size], features: int, call: FlexCall) -> Size:
    """Return the sizes for heads of these features, with a smaller step for complex scores.

    A tile takes registers in proportion to the step. The registers of a score are an estimate.
    """
    size = sizes[features]
    more = max(0, count_operations(call.masked) - SIMPLE)
    more += 0 if fill(call.form, call.leaves).dropout is None else DROPOUT
    most = size.step * DOUBLE // (DOUBLE + more)
    return size._replace(step=max(LEAST, 1 << most.bit_length() - 1))


def _store(out: Any, block: BlockTiles, first: Any, y: jax.Array) -> None:
    """Store a warpgroup's result, from registers."""
    at = out.at[block.r, block.h, pl.ds(first, ROW)]
    plgpu.store(at, y.astype(out.dtype), optimized=False)


def forward(call: FlexCall, x: Arrays, exact: bool) -> tuple[list[jax.Array], jax.Array]:
    """Return out, and each query's maximum and sum of exponentials. See `Machine`."""
    q, k, v = map(padded, (x.q, x.k, x.v))
    Hv = v.shape[-1]
    size = size_of(FORWARD, max(q.shape[-1], Hv), call)
    shape = (ROW, size.step)

    def body(
        block: BlockTiles, first: Any, own: Any, rings: Any, buffer: Any, more: Any, outputs: Any
    ) -> None:
        (keys, values), (out, stats) = rings, outputs

        def step(masked: bool, number: Any, g: Any, start: Any, carry: Any) -> Any:
            top, total, sums = carry
            s = multiply(own(0, start), keys.wait(number).transpose((1, 0)))
            keys.release(number)
            tile = block.tile(masked, g, first, start)
            s = jnp.broadcast_to(tile.score(s, tile.leaves), shape)
            new = jnp.maximum(top, s.max(-1))
            p, old = jnp.exp2(s - spread(new, 0, shape)), jnp.exp2(top - new)
            total = total * old + p.sum(-1)
            sums = sums * spread(old, 0, sums.shape)
            sums = add_product(sums, tile.drop(p), buffer, values.wait(number))
            values.release(number)
            return new, total, sums

        top = softmax.begin(zeros(ROW))
        total = zeros(ROW)
        if x.sinks is not None:
            top, total = zeros(ROW) + more[0][0, block.h, 0, 0] * LOG2E, zeros(ROW) + 1.0
        _, (top, total, sums) = block.each(step, (top, total, zeros(ROW, Hv)))
        share = 1 / softmax.divisor(total)
        _store(out, block, first, call.gain(sums) * spread(share, 0, sums.shape))
        for n, y in enumerate((top, total)):
            plgpu.store(stats.at[block.r, block.h, n, pl.ds(first, ROW)], y, optimized=False)

    R, N, T, _ = q.shape
    outputs = [
        jax.ShapeDtypeStruct((R, N, T, Hv), jnp.float32 if exact else q.dtype),
        jax.ShapeDtypeStruct((R, N, 2, T), jnp.float32),
    ]
    sinks = [] if x.sinks is None else [x.sinks]
    out, stats = run(call, x, True, size, "flex_forward", [q], [k, v], sinks, outputs, body)
    return [out[..., : x.v.shape[-1]]], stats


# The padded matrices that gradients are computed from, q, k, v and the cotangent of out, and the
# numbers of queries [R, N, 3, T′] of `Machine.gradients`.
Operands: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def _gradient(
    tile: Tile, dot: jax.Array, dp: jax.Array, stats: Iterable[jax.Array], leaf: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the weights of a tile before dropout, and the gradient of q·kᵀ, or of a leaf.

    A score depends on one product, and one entry of a leaf, so its derivatives are tiles too.
    """
    top, share, delta = stats
    function, args = tile.function(dot, tile.leaves)
    # The product follows the leaves and the coordinates.
    at = len(function.constvars) + (len(tile.leaves) + len(tile.at) if leaf is None else leaf)
    s, slope = call_with_slope(function, args, at)
    p = jnp.exp2(jnp.broadcast_to(s, dot.shape) - top) * share
    return p, softmax.gradient(p, tile.call.gain(tile.drop(dp)), delta) * (slope * LN2)


def _query_pass(
    call: FlexCall, x: Arrays, operands: Operands, leaf: int | None = None
) -> jax.Array:
    """Return the gradient of queries, or of a leaf of floats by its number.

    That of queries × keys is [R, N, T′, S′], undefined in empty tiles. Others are summed over keys,
    [R, N, T′].
    """
    q, k, v, dout, stats = operands
    size = size_of(BACKWARD, max(q.shape[-1], v.shape[-1]), call)
    shape, (R, N, T, H), S = (ROW, size.step), q.shape, k.shape[2]
    is_tile = leaf is not None and call.leaves[leaf].layout == "tile"

    def body(
        block: BlockTiles, first: Any, own: Any, rings: Any, buffer: Any, more: Any, outputs: Any
    ) -> None:
        line = more[0].at[block.r, block.h]
        rows = [
            plgpu.load(line.at[n, pl.ds(first, ROW)], layout=ROWS, optimized=False)
            for n in range(3)
        ]

        def step(masked: bool, number: Any, g: Any, start: Any, sums: Any) -> Any:
            keys, values = (ring.wait(number) for ring in rings)
            dot = multiply(own(0, start), keys.transpose((1, 0)))
            dp = multiply(own(1, start), values.transpose((1, 0)))
            rings[1].release(number)
            tile = block.tile(masked, g, first, start)
            _, ds = _gradient(tile, dot, dp, (spread(y, 0, shape) for y in rows), leaf)
            if leaf is None:
                sums = add_product(sums, ds, buffer, keys)
            elif is_tile:
                at = block.r, block.h, pl.ds(first, ROW), pl.ds(start, size.step)
                plgpu.store(outputs[0].at[at], ds, optimized=False)
            else:
                sums = sums + ds.sum(-1)
            rings[0].release(number)
            return sums

        sums = None if is_tile else zeros(ROW, H) if leaf is None else zeros(ROW)
        _, sums = block.each(step, sums)
        if not is_tile:
            _store(outputs[0], block, first, sums)

    name = "flex_dq" if leaf is None else "flex_dleaf"
    output = jax.ShapeDtypeStruct((R, N, T, S) if is_tile else (R, N, T), jnp.float32)
    output = jax.ShapeDtypeStruct(q.shape, q.dtype) if leaf is None else output
    return run(call, x, True, size, name, [q, dout], [k, v], [stats], [output], body)[0]


def _key_pass(
    call: FlexCall, x: Arrays, operands: Operands, of: Sequence[str], leaf: int | None = None
) -> list[jax.Array]:
    """Return the gradients that `of` names: of keys `k`, values `v`, or the `leaf` of a number.

    That of a leaf is summed over queries, [R, K, S′].
    """
    q, k, v, dout, stats = operands
    size = size_of(BACKWARD, max(q.shape[-1], v.shape[-1]), call)
    shape, f32 = (ROW, size.step), jnp.float32
    results = {"k": (k.shape, k.dtype), "v": (v.shape, v.dtype), "leaf": (k.shape[:3], f32)}
    outputs = [jax.ShapeDtypeStruct(*results[name]) for name in of]

    def body(
        block: BlockTiles, first: Any, own: Any, rings: Any, buffer: Any, more: Any, outs: Any
    ) -> None:
        def step(masked: bool, number: Any, g: Any, start: Any, sums: Any) -> Any:
            queries, douts = (ring.wait(number) for ring in rings)
            line = more[0].at[block.r, block.query_head(g)]
            numbers = (block.numbers(line.at[n], start, 1, shape) for n in range(3))
            dot = multiply(own(0, start), queries.transpose((1, 0)))
            dp = multiply(own(1, start), douts.transpose((1, 0))) if of != "v" else zeros(*shape)
            tile = block.tile(masked, g, first, start)
            p, ds = _gradient(tile, dot, dp, numbers, leaf)

            def add(name: str, before: jax.Array) -> jax.Array:
                if name == "leaf":
                    return before + ds.sum(-1)
                weights, factor = (ds, queries) if name == "k" else (tile.drop(p), douts)
                return add_product(before, weights, buffer, factor)

            found = [*map(add, of, sums)]
            for ring in rings:
                ring.release(number)
            return found

        sums = block.each(step, [zeros(ROW, *y.shape[3:]) for y in outputs])[1]
        for name, out, y in zip(of, outs, sums, strict=True):
            _store(out, block, first, call.gain(y) if name == "v" else y)

    given = [k] if of == "v" else [k, v], [q, dout], [stats]
    return run(call, x, False, size, "flex_d" + "".join(of), *given, outputs, body)


def _leaf_gradient(call: FlexCall, x: Arrays, operands: Operands, n: int) -> jax.Array:
    """Return the gradient of a leaf of floats, summed over the rows and heads that share it.

    That of queries × keys takes memory of its size: rows and heads that share it are taken one
    after the other.
    """
    leaf, layout, dims = x.leaves[n], call.leaves[n].layout, call.plan.dims
    shared = [axis for axis in (0, 1) if leaf.shape[axis] == 1]
    # Repeat keys for each query head, so that each has its own sums.
    q, k, v, dout, stats = operands
    operands = q, jnp.repeat(k, dims.G, 1), jnp.repeat(v, dims.G, 1), dout, stats
    call = call._replace(plan=call.plan._replace(dims=dims._replace(K=dims.N)))
    if layout != "tile":
        if layout == "row":
            (found,) = _key_pass(call, x, operands, ["leaf"], n)
        else:
            found = _query_pass(call, x, operands, n)
        found = found[:, :, None] if layout in ("row", "column") else found.sum(-1)
        return found.sum(shared).reshape(leaf.shape)
    rows, heads = (q.shape[axis] if axis in shared else 1 for axis in (0, 1))
    x = x._replace(rows=x.rows[:, None], heads=x.heads[None])

    def add(number: Any, total: jax.Array) -> jax.Array:
        at = lax.div(number, jnp.int32(heads)), lax.rem(number, jnp.int32(heads))

        def part(y: jax.Array) -> jax.Array:
            for axis in shared:
                if y.shape[axis] > 1:
                    y = lax.dynamic_slice_in_dim(y, at[axis], 1, axis)
            return y

        here, own = jax.tree.map(part, (x, operands))
        here = here._replace(rows=here.rows[:, 0], heads=here.heads[0])
        found = _query_pass(call, here, own, n)
        # Nothing was written to empty tiles.
        is_visited = jnp.repeat(jnp.repeat(here.states > EMPTY, BLOCK, -1), BLOCK, -2)
        return total + jnp.where(is_visited, found, 0.0)

    return lax.fori_loop(0, rows * heads, add, jnp.zeros(leaf.shape, jnp.float32))


def gradients(
    call: FlexCall, x: Arrays, dout: jax.Array, stats: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array | None]]:
    """Return the gradients of q, k, v and the leaves of floats. See `Machine`."""
    q, k, v, dout = map(padded, (x.q, x.k, x.v, dout))
    operands = q, k, v, dout, stats
    together = max(q.shape[-1], v.shape[-1]) <= TOGETHER
    found = [_query_pass(call, x, operands)]
    for of in ("kv",) if together else ("k", "v"):
        found += _key_pass(call, x, operands, of)
    pairs = zip(found, (x.q, x.k, x.v), strict=True)
    dq, dk, dv = (y[..., : like.shape[-1]] for y, like in pairs)
    of_leaves = [
        _leaf_gradient(call, x, operands, n).astype(y.dtype) if operand.is_learned else None
        for n, (operand, y) in enumerate(zip(call.leaves, x.leaves, strict=True))
    ]
    return dq, dk, dv, of_leaves
