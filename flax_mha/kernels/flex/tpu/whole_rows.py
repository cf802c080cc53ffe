"""The kernel for short sequences on TPUs: forward, and all gradients. See `kernels.short`."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flax_mha.base import trees
from flax_mha.base.coordinates import At
from flax_mha.base.shapes import Dims
from flax_mha.kernels.call.spec import name_result
from flax_mha.kernels.chips import tpus
from flax_mha.kernels.flex.operand import Operand
from flax_mha.kernels.flex.tile import FlexCall, Tile
from flax_mha.kernels.flex.tpu.kernels import block_bytes, dot
from flax_mha.kernels.flex.tpu.tile_order import batch_first, read, turn
from flax_mha.kernels.xla import softmax

# The bytes of a score with its gradients and the intermediates of score functions.
BYTES = 64

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
    """Run body(first, tile, inputs, outputs) for some heads of a row at each step.

    Inputs and outputs are [R, L, features], or [R|1, N|1, …] over heads. `first` is true at the
    first row, and tile(n) is the tile of a query head of the step.
    """
    dims = call.plan.dims
    groups, count = dims.K // heads, heads * dims.G
    pairs = [*zip(call.closed, x.closed, strict=True), *zip(call.leaves, x.leaves, strict=True)]

    def block(y: Any) -> pl.BlockSpec:
        if y.ndim == 3:
            shape = None, y.shape[1], y.shape[2] // groups
            return pl.BlockSpec(shape, lambda g, r, *_: (r, 0, g))
        by_row, by_head = (size > 1 for size in y.shape[:2])
        shape = None, count if by_head else 1, *y.shape[2:]
        return pl.BlockSpec(shape, lambda g, r, *_: (r if by_row else 0, g if by_head else 0, 0, 0))

    def operand_block(operand: Operand, y: Any) -> pl.BlockSpec:
        return pl.BlockSpec(y.shape, lambda *_: (0, 0)) if operand.layout == "whole" else block(y)

    def kernel(rows: Any, all_heads: Any, *refs: Any) -> None:
        group, row = pl.program_id(0), pl.program_id(1)
        iterator = iter(refs)
        ins, arrays, outs = (
            list(itertools.islice(iterator, len(y))) for y in (inputs, pairs, outputs)
        )

        def tile(n: int) -> Tile:
            values = [
                read(y, ref if y.layout == "whole" else _of_head(ref, n), swapped=True)
                for (y, _), ref in zip(pairs, arrays, strict=True)
            ]
            numbers = rows[row], all_heads[group * count + n]
            r, h = (jnp.full((1, 1), y, jnp.int32) for y in numbers)
            q = lax.broadcasted_iota(jnp.int32, (1, dims.T), 1)
            k = lax.broadcasted_iota(jnp.int32, (dims.S, 1), 0)
            return Tile.of(call, call.states[1], values, At(r, h, q, k))

        body(row == 0, tile, ins, outs)

    blocks = [*map(block, inputs), *(operand_block(*pair) for pair in pairs)]
    arrays: list[Any] = [*inputs, *(y for _, y in pairs)]
    shared = any(y.ndim == 4 and y.shape[0] == 1 for y in outputs)
    held = BYTES * count * scores_of(dims)
    for y, spec in zip([*arrays, *outputs], [*blocks, *map(block, outputs)], strict=True):
        held += 2 * block_bytes(spec.block_shape, y.dtype)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=(groups, len(x.q)), in_specs=blocks,
            out_specs=[*map(block, outputs)], scratch_shapes=[],
        ),
        out_shape=outputs,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary" if shared else "parallel"),
            vmem_limit_bytes=tpus.limit(call.device, held),
        ),
        name=name,
    )(*map(batch_first, [x.rows, x.heads, *arrays]))  # fmt: skip


def _of_head(ref: Any, n: int) -> Any:
    """Return the part of a head, of an array that all heads may share."""
    return ref.at[n if ref.shape[0] > 1 else 0]


def _features(n: int, size: int) -> slice:
    return slice(n * size, (n + 1) * size)


def _pull(tile: Tile, product: jax.Array, learned: Sequence[int]) -> tuple[jax.Array, Callable]:
    """Return the scores, and their derivative by k·qᵀ and by learned leaves."""

    def score(s: jax.Array, arrays: list[jax.Array]) -> jax.Array:
        leaves = list(tile.leaves)
        for n, x in zip(learned, arrays, strict=True):
            leaves[n] = x
        return tile.score(s, leaves)

    return jax.vjp(score, product, [tile.leaves[n] for n in learned])


def _exponentials(s: jax.Array, sink: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return exp(s − top), its sum with the sink's, and top, for scores of keys × queries."""
    top = jnp.maximum(jnp.max(s, 0, keepdims=True), softmax.finfo_min(s.dtype))
    top = top if sink is None else jnp.maximum(top, sink)
    p = jnp.exp(s - top)
    total = jnp.sum(p, 0, keepdims=True)
    return p, total if sink is None else total + jnp.exp(sink - top), top


def _run_together(heads: Iterable[Iterator[None]]) -> None:
    """Run the stages of all heads side by side, so that they hide each other's latencies."""
    for _ in itertools.zip_longest(*heads):
        pass


@functools.partial(trees.trace_once, num_static=2)
def _forward(call: FlexCall, heads: int, x: FlatArrays) -> tuple[jax.Array, jax.Array]:
    """Return out and sums, as `core`."""
    dims, (R, T) = call.plan.dims, x.q.shape[:2]

    def body(first: Any, make: Callable, ins: Any, outs: Any) -> None:
        del first
        (q, k, v, *sinks), (out, *sums) = ins, outs

        def attend(n: int) -> Iterator[None]:
            of_k, of_v = (_features(n // dims.G, size) for size in (dims.H, dims.Hv))
            keys, values, tile = k[:, of_k], v[:, of_v], make(n)
            s = tile.score(dot(call, keys, q[:, _features(n, dims.H)], 1, 1), tile.leaves)
            yield
            p, total, top = _exponentials(s, _of_head(sinks[0], n)[...] if sinks else None)
            yield
            weights = tile.drop(p * (1 / softmax.divisor(total)))
            product = call.gain(dot(call, weights.astype(values.dtype), values, 0, 0))
            out[:, _features(n, dims.Hv)] = product.astype(out.dtype)
            for ref in sums:
                ref[n, 0:1, :], ref[n, 1:2, :] = top, total

        _run_together(map(attend, range(heads * dims.G)))

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
    dims, G, H, Hv = call.plan.dims, call.plan.dims.G, call.plan.dims.H, call.plan.dims.Hv
    learned = [n for n, operand in enumerate(call.leaves) if operand.is_learned]

    def body(first: Any, make: Callable, ins: Any, outs: Any) -> None:
        (q, k, v, do, *rest), (dq, dk, dv, *more) = ins, outs
        dtotals, sinks = (rest[:1], rest[1:]) if call.reads_sums else ([], rest)
        sums: list[Any] = [(0.0, 0.0)] * heads
        for ref, y in zip(more, outputs[3:], strict=True):

            @pl.when(first | (y.shape[0] > 1))
            def begin(ref: Any = ref) -> None:
                ref[...] = jnp.zeros_like(ref)

        def differentiate(n: int) -> Iterator[None]:
            tile, sink = make(n), _of_head(sinks[0], n)[...] if sinks else None
            queries, keys = q[:, _features(n, H)], k[:, _features(n // G, H)]
            cotangent, values = do[:, _features(n, Hv)], v[:, _features(n // G, Hv)]
            s, pull = _pull(tile, dot(call, keys, queries, 1, 1), learned)
            yield
            p, total, top = _exponentials(s, sink)
            share = 1 / softmax.divisor(total)
            p = p * share
            yield
            dp = call.gain(tile.drop(dot(call, values, cotangent, 1, 1)))
            yield
            # The product of a huge masked value may be infinite, and 0·∞ is NaN.
            each = jnp.where(p == 0, 0.0, p * dp) if tile.masked else p * dp
            delta = jnp.sum(each, 0, keepdims=True)
            if dtotals:
                delta -= jnp.where(total == 0, 0.0, dtotals[0][n]) * total
            ds, of_leaves = pull(softmax.gradient(p, dp, delta, masked=False))
            ds, p = ds.astype(q.dtype), tile.drop(p).astype(do.dtype)
            yield
            dq[:, _features(n, H)] = dot(call, keys, ds, 0, 0).T.astype(dq.dtype)
            products = dot(call, ds, queries, 1, 0), dot(call, p, cotangent, 1, 0)
            sums[n // G] = jax.tree.map(jnp.add, sums[n // G], products)
            for leaf, ref, d in zip(learned, more[len(sinks) :], of_leaves, strict=True):
                ref[n] += turn(call.leaves[leaf], d.astype(jnp.float32), swapped=True)
            if sink is not None:
                of_sink = softmax.sink_gradient(sink, top, share, delta)
                more[0][n] += jnp.sum(of_sink, 1, keepdims=True)

        _run_together(map(differentiate, range(heads * G)))
        for n, (of_keys, of_values) in enumerate(sums):
            dk[:, _features(n, H)] = of_keys.astype(dk.dtype)
            dv[:, _features(n, Hv)] = call.gain(of_values).astype(dv.dtype)

    def by_head(leaf: int) -> Any:
        """Describe the gradients of a leaf for each head, and for each row that it tells apart."""
        y, is_whole = x.leaves[leaf], call.leaves[leaf].layout == "whole"
        rows = 1 if is_whole else y.shape[0]
        return Shape((rows, dims.N, *y.shape[-2:]), jnp.float32)

    inputs = [x.q, x.k, x.v, dout, *([dtotal] if call.reads_sums else [])]
    inputs += [] if x.sinks is None else [x.sinks]
    outputs = [Shape(y.shape, y.dtype) for y in (x.q, x.k, x.v)]
    outputs += [] if x.sinks is None else [Shape(x.sinks.shape, jnp.float32)]
    outputs += map(by_head, learned)
    dq, dk, dv, *more = _run(call, heads, x, inputs, outputs, "short_backward", body)
    dsinks = None if x.sinks is None else more.pop(0)
    leaves: list[Any] = [None] * len(x.leaves)
    for n, d in zip(learned, more, strict=True):
        like, is_whole = x.leaves[n], call.leaves[n].layout == "whole"
        d = d.sum((0, 1)) if is_whole else d.sum(1, keepdims=True) if like.shape[1] == 1 else d
        leaves[n] = d.astype(like.dtype)
    return FlatArrays(dq, dk, dv, leaves, None, dsinks, None, None)
