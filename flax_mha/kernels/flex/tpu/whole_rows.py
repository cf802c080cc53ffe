"""The kernel for short sequences on TPUs: forward, and all gradients. See `kernels.short`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flax_mha.base import trees
from flax_mha.base.shapes import Dims
from flax_mha.kernels.call.spec import name_result
from flax_mha.kernels.flex.tile import FlexCall, Tile
from flax_mha.kernels.flex.tpu.kernels import (
    dot,
    launch,
    sum_shared,
    tile_at,
)
from flax_mha.kernels.flex.tpu.tile_order import turn
from flax_mha.kernels.xla import softmax

Shape = jax.ShapeDtypeStruct


class FlatArrays(NamedTuple):
    """The arrays of a call, or their gradients.

    Attributes:
      q: [R, T, N·H].
      k: [R, S, K·H].
      v: [R, S, K·Hv].
      leaves: the spec's leaves.
      closed: the arrays that the call's functions close over.
      sinks: float32 [1, N, 1, 1], or None.
      rows: the rows' indices, int32 [R].
      heads: the query heads' indices, int32 [N].
    """

    q: Any
    k: Any
    v: Any
    leaves: list[Any]
    closed: Any
    sinks: Any
    rows: Any
    heads: Any


def scores_of(dims: Dims) -> int:
    """Return the scores of a head in registers of 128 numbers."""
    return -(-dims.T // 128) * -(-dims.S // 128) * 128**2


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def core(call: FlexCall, heads: int, x: FlatArrays) -> tuple[jax.Array, jax.Array]:
    """Return out [R, T, N·Hv] and sums [R, N, 2, T], for q [R, T, N·H], and k and v alike.

    The sums are the maximum and the sum of exponentials, or 0 if nothing reads them.
    """
    return _forward(call, heads, x)


def _core_forward(call: FlexCall, heads: int, x: FlatArrays) -> tuple[Any, FlatArrays]:
    return name_result(*_forward(call, heads, x)), x


def _core_backward(call: FlexCall, heads: int, x: FlatArrays, cotangents: Any) -> tuple[FlatArrays]:
    dout, dsums = cotangents
    return (_backward(call, heads, x, dout.astype(x.q.dtype), dsums[:, :, 1:]),)


core.defvjp(_core_forward, _core_backward)


def _run(
    call: FlexCall, heads: int, x: FlatArrays, inputs: Sequence[jax.Array], outputs: Sequence[Any],
    name: str, body: Callable,
) -> Any:  # fmt: skip
    """Run body(first, tiles, inputs, outputs) for some heads of a row at each step.

    Inputs and outputs are [R, L, features], or [R|1, N|1, …] over heads. `first` is true at the
    first row, and `tiles` are those of the query heads of the step.
    """
    dims = call.plan.dims
    groups, count = dims.K // heads, heads * dims.G

    def with_block(y: Any) -> tuple[Any, pl.BlockSpec]:
        if y.ndim == 2:  # a whole table
            return y, pl.BlockSpec(y.shape, lambda *_: (0, 0))
        if y.ndim == 3:
            shape = None, y.shape[1], y.shape[2] // groups
            return y, pl.BlockSpec(shape, lambda g, r, *_: (r, 0, g))
        by_row, by_head = (size > 1 for size in y.shape[:2])
        shape = None, count if by_head else 1, *y.shape[2:]
        return y, pl.BlockSpec(
            shape, lambda g, r, *_: (r if by_row else 0, g if by_head else 0, 0, 0)
        )

    def run(prefetched: Any, ins: Any, operands: Any, outs: Any, _: Any) -> None:
        (rows, all_heads), group, row = prefetched, pl.program_id(0), pl.program_id(1)
        tiles = [
            tile_at(
                call, call.states[1], [_of_head(ref, n) for ref in operands],
                rows[row], all_heads[group * count + n],
            )
            for n in range(count)
        ]  # fmt: skip
        body(row == 0, tiles, ins, outs)

    shared = any(y.ndim == 4 and y.shape[0] == 1 for y in outputs)
    arrays = inputs, (*x.closed, *x.leaves), outputs
    return launch(
        call, name, run, (groups, len(x.q)), int(shared), count * scores_of(dims),
        [x.rows, x.heads], *([*map(with_block, part)] for part in arrays),
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


def _sink(sinks: Sequence[Any], n: int) -> jax.Array:
    """Return the sink of a query head, or −∞."""
    return _of_head(sinks[0], n)[...] if sinks else jnp.full((1, 1), -jnp.inf)


def _exponentials(s: jax.Array, sink: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return exp(s − top), its sum with the sink's, and top, for scores of keys × queries."""
    least = jnp.maximum(sink, softmax.finfo_min(s.dtype))
    top = jnp.maximum(jnp.max(s, 0, keepdims=True), least)
    p = jnp.exp(s - top)
    return p, jnp.sum(p, 0, keepdims=True) + jnp.exp(sink - top), top


@functools.partial(trees.trace_once, num_static=2)
def _forward(call: FlexCall, heads: int, x: FlatArrays) -> tuple[jax.Array, jax.Array]:
    """Return out and sums. Arguments and results are those of `core`."""
    dims, (R, T) = call.plan.dims, x.q.shape[:2]

    def body(first: Any, tiles: list[Tile], ins: Any, outs: Any) -> None:
        del first
        (q, k, v, *sinks), (out, *sums) = ins, outs
        queries, keys, values = _split(call, q, k, v)
        # Stage by stage, so that the heads of a step hide each other's latencies.
        products = [dot(call, kk, qq, 1, 1) for kk, qq in zip(keys, queries, strict=True)]
        scores = [tile.score(s, tile.leaves) for tile, s in zip(tiles, products, strict=True)]
        weights = [_exponentials(s, _sink(sinks, n)) for n, s in enumerate(scores)]
        for n, (tile, (p, total, top)) in enumerate(zip(tiles, weights, strict=True)):
            p = tile.drop(p * (1 / softmax.divisor(total)))
            product = call.gain(dot(call, p.astype(v.dtype), values[n], 0, 0))
            out[:, _features(n, dims.Hv)] = product.astype(out.dtype)
            for ref in sums:
                ref[n, 0:1, :], ref[n, 1:2, :] = top, total

    inputs = [x.q, x.k, x.v, *([] if x.sinks is None else [x.sinks])]
    outputs = [Shape((R, T, dims.N * dims.Hv), x.q.dtype)]
    outputs += [Shape((R, dims.N, 2, T), jnp.float32)] if call.reads_sums else []
    out, *sums = _run(call, heads, x, inputs, outputs, "short_forward", body)
    return out, sums[0] if sums else jnp.zeros((R, dims.N, 2, T), jnp.float32)


@functools.partial(trees.trace_once, num_static=2)
def _backward(
    call: FlexCall, heads: int, x: FlatArrays, dout: jax.Array, dtotal: jax.Array
) -> FlatArrays:
    """Return the gradients of q, k, v, of learned leaves, and of sinks.

    dtotal is the cotangent of the sums of exponentials, [R, N, 1, T].
    """
    dims, G = call.plan.dims, call.plan.dims.G
    learned = [n for n, operand in enumerate(call.leaves) if operand.is_learned]

    def body(first: Any, tiles: list[Tile], ins: Any, outs: Any) -> None:
        (q, k, v, do, *rest), (dq, dk, dv, *more) = ins, outs
        dtotals, sinks = (rest[:1], rest[1:]) if call.reads_sums else ([], rest)
        for ref, y in zip(more, outputs[3:], strict=True):

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
            if dtotals:
                delta -= jnp.where(total == 0, 0.0, dtotals[0][n]) * total
            ds, of_leaves = scores[n][1](softmax.gradient(p, dp, delta, masked=False))
            dscores.append(ds.astype(q.dtype))
            kept.append(tile.drop(p).astype(do.dtype))
            for leaf, ref in zip(learned, more[len(sinks) :], strict=True):
                d = of_leaves[leaf].astype(jnp.float32)
                ref[n] += turn(call.leaves[leaf], d, swapped=True)
            if sinks:
                of_sink = softmax.sink_gradient(_sink(sinks, n), top, share, delta)
                more[0][n] += jnp.sum(of_sink, 1, keepdims=True)
        for head in range(heads):
            of_keys: Any = 0.0
            of_values: Any = 0.0
            for n in range(head * G, (head + 1) * G):
                dq[:, _features(n, dims.H)] = dot(call, keys[n], dscores[n], 0, 0).T.astype(
                    dq.dtype
                )
                of_keys += dot(call, dscores[n], queries[n], 1, 0)
                of_values += dot(call, kept[n], cotangents[n], 1, 0)
            dk[:, _features(head, dims.H)] = of_keys.astype(dk.dtype)
            dv[:, _features(head, dims.Hv)] = call.gain(of_values).astype(dv.dtype)

    def by_head(leaf: int) -> Any:
        """Describe the gradients of a leaf for each head, and for each row that it tells apart."""
        y = x.leaves[leaf]
        return Shape((1 if y.ndim == 2 else y.shape[0], dims.N, *y.shape[-2:]), jnp.float32)

    inputs = [x.q, x.k, x.v, dout, *([dtotal] if call.reads_sums else [])]
    inputs += [] if x.sinks is None else [x.sinks]
    outputs = [Shape(y.shape, y.dtype) for y in (x.q, x.k, x.v)]
    outputs += [] if x.sinks is None else [Shape(x.sinks.shape, jnp.float32)]
    outputs += map(by_head, learned)
    dq, dk, dv, *more = _run(call, heads, x, inputs, outputs, "short_backward", body)
    dsinks = None if x.sinks is None else more.pop(0)
    leaves: list[Any] = [None] * len(x.leaves)
    for n, d in zip(learned, more, strict=True):
        leaves[n] = sum_shared(call.leaves[n], d, x.leaves[n])
    return FlatArrays(dq, dk, dv, leaves, None, dsinks, None, None)
