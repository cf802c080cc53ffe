"""The kernel for short sequences on TPUs: forward, and all gradients. See `kernels.short`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flax_mha.base import trees
from flax_mha.base.shapes import Dims
from flax_mha.kernels.call.spec import name_result
from flax_mha.kernels.flex.operand import Operand
from flax_mha.kernels.flex.passes import Arrays
from flax_mha.kernels.flex.tile import LN2, LOG2E, FlexCall, Tile
from flax_mha.kernels.flex.tpu.kernels import (
    dot,
    launch,
    sum_shared,
    tile_at,
)
from flax_mha.kernels.flex.tpu.tile_order import Blocked, turn
from flax_mha.kernels.xla import softmax

Shape = jax.ShapeDtypeStruct


def scores_of(dims: Dims) -> int:
    """Return the scores of a head in registers of 128 numbers."""
    return -(-dims.T // 128) * -(-dims.S // 128) * 128**2


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def core(call: FlexCall, heads: int, x: Arrays) -> tuple[jax.Array, jax.Array]:
    """Return out [R, T, N·Hv] and sums [R, N, 2, T], for q [R, T, N·H], and k and v alike.

    The sums are the maximum and the sum of exponentials, or 0 if nothing reads them.
    """
    return _forward(call, heads, x)


def _core_forward(call: FlexCall, heads: int, x: Arrays) -> tuple[Any, Arrays]:
    return name_result(*_forward(call, heads, x)), x


def _core_backward(call: FlexCall, heads: int, x: Arrays, cotangents: Any) -> tuple[Arrays]:
    dout, dsums = cotangents
    return (_backward(call, heads, x, dout.astype(x.q.dtype), dsums[:, :, 1:]),)


core.defvjp(_core_forward, _core_backward)


def _run(
    call: FlexCall, heads: int, x: Arrays, inputs: Any, outputs: Any, name: str, body: Callable
) -> Any:
    """Run body(first, tiles, inputs, outputs) for some heads of a row at each step.

    Inputs and outputs are trees of [R, L, features], or [R|1, N|1, …] over heads. `first` is true
    at the first row, and `tiles` are those of the query heads of the step.
    """
    dims = call.plan.dims
    groups, count = dims.K // heads, heads * dims.G

    def with_block(y: Any) -> Blocked:
        if y.ndim == 2:  # a whole table
            return Blocked(y, pl.BlockSpec(y.shape, lambda *_: (0, 0)))
        if y.ndim == 3:
            shape = None, y.shape[1], y.shape[2] // groups
            return Blocked(y, pl.BlockSpec(shape, lambda g, r, *_: (r, 0, g)))
        by_row, by_head = (size > 1 for size in y.shape[:2])
        shape = None, count if by_head else 1, *y.shape[2:]
        return Blocked(y, pl.BlockSpec(
            shape, lambda g, r, *_: (r if by_row else 0, g if by_head else 0, 0, 0)
        ))  # fmt: skip

    def run(prefetched: Any, given: Any, outs: Any, _: Any) -> None:
        (rows, all_heads), (ins, operands) = prefetched, given
        group, row = pl.program_id(0), pl.program_id(1)
        tiles = [
            tile_at(
                call, call.states[1], [_of_head(ref, n) for ref in operands],
                rows[row], all_heads[group * count + n],
            )
            for n in range(count)
        ]  # fmt: skip
        body(row == 0, tiles, ins, outs)

    shared = any(y.ndim == 4 and y.shape[0] == 1 for y in jax.tree.leaves(outputs))
    given = inputs, [*x.closed, *x.leaves]
    return launch(
        call, name, run, (groups, len(x.q)), int(shared), count * scores_of(dims),
        [x.rows, x.heads], *(jax.tree.map(with_block, tree) for tree in (given, outputs)),
    )  # fmt: skip


def _of_head(ref: Any, n: int) -> Any:
    """Return the part of a head, of an array that all heads may share."""
    return ref if ref.ndim == 2 else ref.at[n if ref.shape[0] > 1 else 0]


def _features(n: int, size: int) -> slice:
    return slice(n * size, (n + 1) * size)


def _split(call: FlexCall, q: Any, k: Any, v: Any) -> list[list[jax.Array]]:
    """Return the queries, keys and values of each query head, of references to those of a step."""
    dims = call.plan.dims
    parts = (q, dims.H, 1), (k, dims.H, dims.G), (v, dims.Hv, dims.G)
    heads = range(q.shape[1] // dims.H)
    return [[y[:, _features(n // group, size)] for n in heads] for y, size, group in parts]


def _sink(sinks: Any, n: int) -> jax.Array:
    """Return the sink of a query head in base 2, or −∞ if there are none."""
    return jnp.full((1, 1), -jnp.inf) if sinks is None else _of_head(sinks, n)[...] * LOG2E


def _exponentials(s: jax.Array, sink: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return 2^(s − top), its sum with the sink's, and top, for scores of keys × queries."""
    least = jnp.maximum(sink, softmax.finfo_min(s.dtype))
    top = jnp.maximum(jnp.max(s, 0, keepdims=True), least)
    p = jnp.exp2(s - top)
    return p, jnp.sum(p, 0, keepdims=True) + jnp.exp2(sink - top), top


@functools.partial(trees.trace_once, num_static=2)
def _forward(call: FlexCall, heads: int, x: Arrays) -> tuple[jax.Array, jax.Array]:
    """Return out and sums. Arguments and results are those of `core`."""
    dims, (R, T) = call.plan.dims, x.q.shape[:2]

    def body(first: Any, tiles: list[Tile], ins: Any, outs: Any) -> None:
        del first
        (q, k, v, sinks), (out, sums) = ins, outs
        queries, keys, values = _split(call, q, k, v)
        # Stage by stage, so that the heads of a step hide each other's latencies.
        products = [dot(call, kk, qq, 1, 1) for kk, qq in zip(keys, queries, strict=True)]
        scores = [tile.score(s, tile.leaves) for tile, s in zip(tiles, products, strict=True)]
        weights = [_exponentials(s, _sink(sinks, n)) for n, s in enumerate(scores)]
        for n, (tile, (p, total, top)) in enumerate(zip(tiles, weights, strict=True)):
            p = tile.drop(p * (1 / softmax.divisor(total)))
            product = call.gain(dot(call, p.astype(v.dtype), values[n], 0, 0))
            out[:, _features(n, dims.Hv)] = product.astype(out.dtype)
            if sums is not None:
                sums[n, 0:1, :], sums[n, 1:2, :] = top * LN2, total

    shape = R, dims.N, 2, T
    of_sums = Shape(shape, jnp.float32) if call.reads_sums else None
    inputs = x.q, x.k, x.v, x.sinks
    outputs = Shape((R, T, dims.N * dims.Hv), x.q.dtype), of_sums
    out, sums = _run(call, heads, x, inputs, outputs, "short_forward", body)
    return out, jnp.zeros(shape, jnp.float32) if sums is None else sums


@functools.partial(trees.trace_once, num_static=2)
def _backward(call: FlexCall, heads: int, x: Arrays, dout: jax.Array, dtotal: jax.Array) -> Arrays:
    """Return the gradients of q, k, v, of learned leaves, and of sinks.

    dtotal is the cotangent of the sums of exponentials, [R, N, 1, T].
    """
    dims, G = call.plan.dims, call.plan.dims.G

    def body(first: Any, tiles: list[Tile], ins: Any, outs: Any) -> None:
        (q, k, v, do, dtotals, sinks), (dq, dk, dv, dsinks, dleaves) = ins, outs
        for ref, y in zip(*map(jax.tree.leaves, (outs[3:], outputs[3:])), strict=True):

            @pl.when(first | (y.shape[0] > 1))
            def begin(ref: Any = ref) -> None:
                ref[...] = jnp.zeros_like(ref)

        queries, keys, values = _split(call, q, k, v)
        cotangents = [do[:, _features(n, dims.Hv)] for n in range(len(tiles))]
        # Stage by stage, as forward: scores, weights, their gradients, those of scores, products.
        scores = [
            jax.vjp(tile.score, dot(call, keys[n], queries[n], 1, 1), tile.leaves)
            for n, tile in enumerate(tiles)
        ]
        softmaxes, weights = [], []
        for n, (s, _) in enumerate(scores):
            p, total, top = _exponentials(s, _sink(sinks, n))
            share = 1 / softmax.divisor(total)
            softmaxes.append((total, top, share))
            weights.append(p * share)
        dweights = [
            call.gain(tile.drop(dot(call, values[n], cotangents[n], 1, 1)))
            for n, tile in enumerate(tiles)
        ]
        dscores, kept = [], []
        for n, (tile, p, dp) in enumerate(zip(tiles, weights, dweights, strict=True)):
            total, top, share = softmaxes[n]
            # The product of a huge masked value may be infinite, and 0·∞ is NaN.
            each = jnp.where(p == 0, 0.0, p * dp) if tile.masked else p * dp
            delta = jnp.sum(each, 0, keepdims=True)
            if dtotals is not None:
                delta -= jnp.where(total == 0, 0.0, dtotals[n]) * total
            ds, of_leaves = scores[n][1](softmax.gradient(p, dp, delta, masked=False))
            dscores.append(ds.astype(q.dtype))
            kept.append(tile.drop(p).astype(do.dtype))
            for operand, ref, d in zip(call.leaves, dleaves, of_leaves, strict=True):
                if ref is not None:
                    ref[n] += LN2 * turn(operand, d.astype(jnp.float32), swapped=True)
            if dsinks is not None:
                of_sink = -jnp.exp2(_sink(sinks, n) - top) * share * delta
                dsinks[n] += jnp.sum(of_sink, 1, keepdims=True)
        for head in range(heads):
            of_keys: Any = 0.0
            of_values: Any = 0.0
            for n in range(head * G, (head + 1) * G):
                of_queries = LN2 * dot(call, keys[n], dscores[n], 0, 0).T
                dq[:, _features(n, dims.H)] = of_queries.astype(dq.dtype)
                of_keys += dot(call, dscores[n], queries[n], 1, 0)
                of_values += dot(call, kept[n], cotangents[n], 1, 0)
            dk[:, _features(head, dims.H)] = (LN2 * of_keys).astype(dk.dtype)
            dv[:, _features(head, dims.Hv)] = call.gain(of_values).astype(dv.dtype)

    def of_heads(operand: Operand, y: jax.Array) -> Any:
        """Describe the gradient of a leaf for each head, and for each row that it tells apart."""
        shape = 1 if y.ndim == 2 else len(y), dims.N, *y.shape[-2:]
        return Shape(shape, jnp.float32) if operand.is_learned else None

    inputs = x.q, x.k, x.v, dout, dtotal if call.reads_sums else None, x.sinks
    like = [y if y is None else Shape(y.shape, y.dtype) for y in (x.q, x.k, x.v, x.sinks)]
    outputs = *like, [*map(of_heads, call.leaves, x.leaves)]
    dq, dk, dv, dsinks, dleaves = _run(call, heads, x, inputs, outputs, "short_backward", body)
    leaves = [*map(sum_shared, call.leaves, dleaves, x.leaves)]
    return Arrays(dq, dk, dv, leaves, dsinks)
