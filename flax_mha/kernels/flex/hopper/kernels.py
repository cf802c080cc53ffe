"""The kernels of flex for Hopper: forward, and the gradients of queries, keys and values."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from flax_mha.kernels.flex.hopper.block import ROW, BlockTiles, Size, spread, zeros
from flax_mha.kernels.flex.hopper.fragments import call_with_slopes
from flax_mha.kernels.flex.hopper.launch import padded, run
from flax_mha.kernels.flex.hopper.sync import ROWS, add_product, multiply
from flax_mha.kernels.flex.passes import Arrays
from flax_mha.kernels.flex.tile import FlexCall, Tile
from flax_mha.kernels.xla import softmax

LOG2E = math.log2(math.e)
# The most features of heads whose gradients of keys and values are summed together.
TOGETHER = 64
# The sizes of kernels by the features of a head.
FORWARD = {64: Size(128, 3), 128: Size(128, 2), 192: Size(32, 4), 256: Size(32, 4)}
BACKWARD = {64: Size(64, 2), 128: Size(64, 2), 192: Size(32, 2), 256: Size(32, 2)}
# These sizes are for masks and scores of at most SIMPLE operations. DOUBLE more need as many
# registers as all else. Dropout counts as DROPOUT operations, and each number that a query or key
# has of its own as one. No step is below LEAST.
SIMPLE, DOUBLE, DROPOUT, LEAST = 24, 32, 24, 16


def size_of(sizes: dict[int, Size], features: int, call: FlexCall) -> Size:
    """Return the sizes for heads of these features, with a smaller step for complex scores.

    A tile takes registers in proportion to the step. The registers of a score are an estimate.
    """
    size = sizes[features]
    more = max(0, call.masked.operations - SIMPLE)
    more += sum(x.shape[-1] for x in call.leaves if x.side)
    more += 0 if call.form.fill(call.leaves).dropout is None else DROPOUT
    most = size.step * DOUBLE // (DOUBLE + more)
    return size._replace(step=max(LEAST, 1 << most.bit_length() - 1))


def _store(out: Any, block: BlockTiles, first: Any, y: jax.Array) -> None:
    """Store a warpgroup's result, from registers."""
    at = out.at[block.r, block.h, pl.ds(first, ROW)]
    plgpu.store(at, y.astype(out.dtype), optimized=False)


def forward(call: FlexCall, x: Arrays, exact: bool) -> tuple[list[jax.Array], jax.Array]:
    """Return out, and each query's maximum and sum of exponentials. See `Machine`."""
    k, v = softmax.move_nan_to_keys(x.k, x.v) if call.guarded else (x.k, x.v)
    q, k, v = padded(x.q), padded(k), padded(v)
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
            s = tile.score(s, tile.leaves) * LOG2E
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
        for n, y in enumerate((top / LOG2E, total)):
            plgpu.store(stats.at[block.r, block.h, n, pl.ds(first, ROW)], y, optimized=False)

    R, N, T, _ = q.shape
    outputs = [
        jax.ShapeDtypeStruct((R, N, T, Hv), jnp.float32 if exact else q.dtype),
        jax.ShapeDtypeStruct((R, N, 2, T), jnp.float32),
    ]
    sinks = [] if x.sinks is None else [x.sinks]
    out, stats = run(call, x, True, size, "flex_forward", [q], [k, v], sinks, outputs, body)
    return [out[..., : x.v.shape[-1]]], stats


def _gradient(
    tile: Tile, dot: jax.Array, dp: jax.Array, top: jax.Array, share: jax.Array, delta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the weights of a tile before dropout, and the gradient of q·kᵀ.

    A score depends on one product only, so its derivative is a tile too. `top` is in base 2.
    """
    function, args = tile.function(dot, tile.leaves)
    # The product is the last argument that is float.
    at = max(n for n, x in enumerate(function.variables) if x.aval.dtype == jnp.float32)
    s, (slope,) = call_with_slopes(function, args, at, [jnp.float32(1)])
    s = jnp.broadcast_to(s, dot.shape)
    p = jnp.where(s == -jnp.inf, 0.0, jnp.exp2(s * LOG2E - top) * share)
    return p, softmax.gradient(p, tile.call.gain(tile.drop(dp)), delta) * slope


def _query_gradient(
    call: FlexCall, x: Arrays, q: Any, k: Any, v: Any, dout: Any, stats: Any
) -> jax.Array:
    size = size_of(BACKWARD, max(q.shape[-1], v.shape[-1]), call)
    shape = (ROW, size.step)

    def body(
        block: BlockTiles, first: Any, own: Any, rings: Any, buffer: Any, more: Any, outputs: Any
    ) -> None:
        line = more[0].at[block.r, block.h]
        rows = [
            plgpu.load(line.at[n, pl.ds(first, ROW)], layout=ROWS, optimized=False)
            for n in range(3)
        ]
        rows[0] = rows[0] * LOG2E

        def step(masked: bool, number: Any, g: Any, start: Any, sums: Any) -> Any:
            keys, values = (ring.wait(number) for ring in rings)
            dot = multiply(own(0, start), keys.transpose((1, 0)))
            dp = multiply(own(1, start), values.transpose((1, 0)))
            rings[1].release(number)
            tile = block.tile(masked, g, first, start)
            _, ds = _gradient(tile, dot, dp, *(spread(y, 0, shape) for y in rows))
            sums = add_product(sums, ds, buffer, keys)
            rings[0].release(number)
            return sums

        sums = block.each(step, zeros(ROW, q.shape[-1]))[1]
        _store(outputs[0], block, first, sums)

    outputs = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    given = [q, dout], [k, v], [stats]
    return run(call, x, True, size, "flex_dq", *given, outputs, body)[0]


def _key_gradients(
    call: FlexCall, x: Arrays, q: Any, k: Any, v: Any, dout: Any, stats: Any, of: str
) -> list[jax.Array]:
    """Return the gradients of keys and values, or only those that `of` names, `k` and `v`."""
    size = size_of(BACKWARD, max(q.shape[-1], v.shape[-1]), call)
    shape = (ROW, size.step)
    wanted = [y for y, name in ((k, "k"), (v, "v")) if name in of]

    def body(
        block: BlockTiles, first: Any, own: Any, rings: Any, buffer: Any, more: Any, outputs: Any
    ) -> None:
        def step(masked: bool, number: Any, g: Any, start: Any, sums: Any) -> Any:
            queries, douts = (ring.wait(number) for ring in rings)
            line = more[0].at[block.r, block.query_head(g)]
            top, share, delta = (block.numbers(line.at[n], start, 1, shape) for n in range(3))
            dot = multiply(own(0, start), queries.transpose((1, 0)))
            dp = multiply(own(1, start), douts.transpose((1, 0))) if "k" in of else zeros(*shape)
            tile = block.tile(masked, g, first, start)
            p, ds = _gradient(tile, dot, dp, top * LOG2E, share, delta)
            factors = {"k": (ds, queries), "v": (tile.drop(p), douts)}
            found = []
            for name, before in zip(of, sums, strict=True):
                weights, factor = factors[name]
                found.append(add_product(before, weights, buffer, factor))
            for ring in rings:
                ring.release(number)
            return found

        sums = block.each(step, [zeros(ROW, y.shape[-1]) for y in wanted])[1]
        for name, out, y in zip(of, outputs, sums, strict=True):
            _store(out, block, first, call.gain(y) if name == "v" else y)

    outputs = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in wanted]
    given = [k, v] if "k" in of else [k], [q, dout], [stats]
    return run(call, x, False, size, f"flex_d{of}", *given, outputs, body)


def matrix_gradients(
    call: FlexCall, x: Arrays, dout: jax.Array, stats: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of q, k and v. See `Machine`."""
    q, k, v, wide = map(padded, (x.q, x.k, x.v, dout))
    together = max(q.shape[-1], v.shape[-1]) <= TOGETHER
    found: list[jax.Array] = []
    for of in ("kv",) if together else ("k", "v"):
        found += _key_gradients(call, x, q, k, v, wide, stats, of)
    (dk, dv), dq = found, _query_gradient(call, x, q, k, v, wide, stats)
    pairs = zip((dq, dk, dv), (x.q, x.k, x.v), strict=True)
    dq, dk, dv = (y[..., : like.shape[-1]] for y, like in pairs)
    return dq, dk, dv
