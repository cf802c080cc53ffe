"""The kernels of flex for TPUs: forward, and the gradients of queries, keys, values and leaves."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flax_mha.base.coordinates import At
from flax_mha.kernels import softmax
from flax_mha.kernels.flex.core import Arrays
from flax_mha.kernels.flex.tile import FlexCall, Tile
from flax_mha.kernels.flex.tpu.order import FlexTile, Operand, TileOrder, blocks_of, read
from flax_mha.masks import FULL, PARTIAL

Shape = jax.ShapeDtypeStruct


def _tile(
    call: FlexCall, masked: bool, tile: FlexTile, row: jax.Array, head: jax.Array,
    refs: Sequence[Any],
) -> Tile:  # fmt: skip
    """Return a tile from its indices, those of its row and head in the whole call, and its arrays.

    The references are to the closed-over arrays and the spec's leaves.
    """
    operands = zip((*call.closed, *call.leaves), refs, strict=True)
    values = [read(operand, ref) for operand, ref in operands]
    sizes = (call.plan.block_q, 1), (1, call.plan.block_k)
    q, k = (
        lax.broadcasted_iota(jnp.int32, size, axis) + block * max(size)
        for axis, (size, block) in enumerate(zip(sizes, (tile.i, tile.j), strict=True))
    )
    row, head = (jnp.full((1, 1), x, jnp.int32) for x in (row, head))
    return Tile.of(call, masked, values, At(row, head, q, k))


def _dot(call: FlexCall, a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    """Return the matmul of a and b over one axis of each, in float32."""
    return lax.dot_general(
        a, b, (((axis_a,), (axis_b,)), ((), ())),
        precision=call.precision if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def _gradient(
    tile: Tile, operands: Sequence[Any], learned: Sequence[int] = ()
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Return the kept weights, and the gradients of q·kᵀ and of learned leaves."""
    q, k, v, dout, stats = operands
    call, (top, share, delta) = tile.call, (stats[n : n + 1, :].T for n in range(3))

    def score(s: jax.Array, arrays: list[jax.Array]) -> jax.Array:
        leaves = list(tile.leaves)
        for n, x in zip(learned, arrays, strict=True):
            leaves[n] = x
        return tile.score(s, leaves)

    dot = _dot(call, q[...], k[...], 1, 1)
    s, pull = jax.vjp(score, dot, [tile.leaves[n] for n in learned])
    p = softmax.weights(s, top, share, guarded=True)
    dp = call.gain(tile.drop(_dot(call, dout[...], v[...], 1, 1)))
    return tile.drop(p), *pull(softmax.gradient(p, dp, delta))


def _begin_at_zero(_: Any, sums: Sequence[Any]) -> None:
    for acc in sums:
        acc[...] = jnp.zeros_like(acc)


def _kernel(
    call: FlexCall, grid: TileOrder, counts: Sequence[int], visit: Callable, end: Callable | None,
    begin: Callable,
) -> Callable[..., None]:  # fmt: skip
    """Return the kernel of `_run`, given the number of references of each kind."""

    def kernel(*refs: Any) -> None:
        iterator = iter(refs)
        (rows, heads, *tables), ins, others, outs, sums = (
            list(itertools.islice(iterator, count)) for count in counts
        )
        sums = sums or outs
        tile, first, last = grid.current(tables)
        row, head = rows[tile.r], heads[tile.n]
        pl.when(first)(functools.partial(begin, ins, sums))
        for state, may_be in zip((FULL, PARTIAL), call.states, strict=True):
            if may_be:

                @pl.when(tile.state == state)
                def _(masked: bool = state == PARTIAL) -> None:
                    visit(_tile(call, masked, tile, row, head, others), ins, sums)

        if end:
            pl.when(last)(functools.partial(end, outs, sums))

    return kernel


def _run(
    call: FlexCall, x: Arrays, order: tuple[str, int], name: str, inputs: str,
    more: dict[str, jax.Array], outputs: Sequence[Any], scratch: Sequence[Any], visit: Callable,
    end: Callable | None, begin: Callable = _begin_at_zero,
) -> Any:  # fmt: skip
    """Run visit(tile, inputs, sums) over the tiles that are not empty, in an order.

    `order` has the axes and the number of inner ones, `inputs` a letter for each input, and `more`
    further inputs [R, N, ·, T′] by letter. `outputs` pairs a shape with the letter of its blocks,
    or with its `Operand`. `scratch` holds the shapes of the sums, float32, which begin at 0, or as
    begin(inputs, sums) sets them. Where they end, end(outputs, sums) runs. If it is None, the
    outputs are the sums.
    """
    axes, inner = order
    R, N, _, H = x.q.shape
    bq, bk, Hv = call.plan.block_q, call.plan.block_k, x.v.shape[-1]
    grid, tables = TileOrder.of(axes, inner, x.states, call.plan, call.visits, R, N)
    blocks: dict[str, Any] = {
        "q": ((bq, H), "rni."), "k": ((bk, H), "rhj."), "v": ((bk, Hv), "rhj."),
        "o": ((bq, Hv), "rni."), "s": ((3, bq), "rn.i"), "t": ((2, bq), "rn.i"),
        "b": ((1, 1), ".n.."),
    }  # fmt: skip
    arrays = {"q": x.q, "k": x.k, "v": x.v, "b": x.sinks} | more
    operands = [*zip(call.closed, x.closed, strict=True), *zip(call.leaves, x.leaves, strict=True)]

    def place(letter: str) -> pl.BlockSpec:
        shape, axes = blocks[letter]
        return grid.block((None, None, *shape), axes)

    blocks_in = [*map(place, inputs), *(blocks_of(y, grid, array) for y, array in operands)]
    blocks_out = [place(b) if isinstance(b, str) else blocks_of(b, grid, y) for y, b in outputs]
    prefetched = [x.rows, x.heads, *tables]
    counts = [*map(len, (prefetched, inputs, operands, outputs, scratch))]
    semantics: Any = ("parallel",) * (len(axes) - inner) + ("arbitrary",) * inner
    return pl.pallas_call(
        _kernel(call, grid, counts, visit, end, begin),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=grid.sizes,
            in_specs=blocks_in,
            out_specs=blocks_out,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[shape for shape, _ in outputs],
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        name=name,
    )(*map(jnp.asarray, prefetched), *(arrays[a] for a in inputs), *(y for _, y in operands))


def forward(call: FlexCall, x: Arrays, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return out in a dtype, and each query's maximum and sum of exponentials, [R, N, 2, T′]."""
    R, N, T, _ = x.q.shape
    bq, Hv = call.plan.block_q, x.v.shape[-1]

    def begin(inputs: Any, sums: Any) -> None:
        sinks, (top, total, acc) = inputs[3:], sums
        acc[...] = jnp.zeros_like(acc)
        total[...] = jnp.full_like(total, 1.0 if sinks else 0.0)
        initial = softmax.begin(jnp.zeros_like(top))
        top[...] = jnp.broadcast_to(sinks[0][...], top.shape) if sinks else initial

    def visit(tile: Tile, inputs: Any, sums: Any) -> None:
        (q, k, v, *_), (top, total, acc) = inputs, sums
        s = tile.score(_dot(call, q[...], k[...], 1, 1), tile.leaves)
        top[...], total[...], p, old = softmax.step(top[...], total[...], s)
        p = tile.drop(p).astype(v.dtype)
        acc[...] = acc[...] * old + _dot(call, p, v[...], 1, 0)

    def end(outputs: Any, sums: Any) -> None:
        (out, stats), (top, total, acc) = outputs, sums
        out[...] = (call.gain(acc[...]) / softmax.divisor(total[...])).astype(out.dtype)
        stats[0:1, :] = top[...].T
        stats[1:2, :] = total[...].T

    outputs = [(Shape((R, N, T, Hv), dtype), "o"), (Shape((R, N, 2, T), jnp.float32), "t")]
    inputs = "qkv" if x.sinks is None else "qkvb"
    scratch = [(bq, 1), (bq, 1), (bq, Hv)]
    order = "rnit", 1
    return _run(call, x, order, "flex_forward", inputs, {}, outputs, scratch, visit, end, begin)


def gradients(
    call: FlexCall, x: Arrays, dout: jax.Array, stats: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array | None]]:
    """Return the gradients of q, k, v and the learned leaves. See `Machine`."""
    more = {"o": dout, "s": stats}
    dk, dv = _key_gradients(call, x, more)
    return _query_gradient(call, x, more), dk, dv, _leaf_gradients(call, x, more)


def _query_gradient(call: FlexCall, x: Arrays, more: dict[str, jax.Array]) -> jax.Array:
    def visit(tile: Tile, inputs: Any, sums: Any) -> None:
        k = inputs[1][...]
        _, ds, _ = _gradient(tile, inputs)
        sums[0][...] += _dot(call, ds.astype(k.dtype), k, 1, 0)

    def end(outputs: Any, sums: Any) -> None:
        outputs[0][...] = sums[0][...].astype(outputs[0].dtype)

    outputs = [(Shape(x.q.shape, x.q.dtype), "q")]
    scratch = [(call.plan.block_q, x.q.shape[-1])]
    return _run(call, x, ("rnit", 1), "flex_dq", "qkvos", more, outputs, scratch, visit, end)[0]


def _key_gradients(
    call: FlexCall, x: Arrays, more: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    def visit(tile: Tile, inputs: Any, sums: Any) -> None:
        q, dout = inputs[0][...], inputs[3][...]
        p, ds, _ = _gradient(tile, inputs)
        sums[0][...] += _dot(call, ds.astype(q.dtype), q, 0, 0)
        sums[1][...] += _dot(call, p.astype(q.dtype), dout, 0, 0)

    def end(outputs: Any, sums: Any) -> None:
        dk, dv = outputs
        dk[...] = sums[0][...].astype(dk.dtype)
        dv[...] = call.gain(sums[1][...]).astype(dv.dtype)

    outputs = [(Shape(x.k.shape, x.k.dtype), "k"), (Shape(x.v.shape, x.v.dtype), "v")]
    scratch = [(call.plan.block_k, y.shape[-1]) for y in (x.k, x.v)]
    order = "rkjgt", 2
    dk, dv = _run(call, x, order, "flex_dkv", "qkvos", more, outputs, scratch, visit, end)
    return dk, dv


def _leaf_gradients(
    call: FlexCall, x: Arrays, more: dict[str, jax.Array]
) -> list[jax.Array | None]:
    """Return the gradients of the learned leaves, computed together for each order."""
    groups: dict[tuple[str, int], list[int]] = {}
    for n, (operand, y) in enumerate(zip(call.leaves, x.leaves, strict=True)):
        if operand.is_learned:
            groups.setdefault(_order_of(operand, y), []).append(n)
    grads: list[jax.Array | None] = [None] * len(x.leaves)
    for order, learned in groups.items():

        def visit(tile: Tile, inputs: Any, sums: Any, learned: Any = learned) -> None:
            _, _, of_tile = _gradient(tile, inputs, learned)
            for n, out, d in zip(learned, sums, of_tile, strict=True):
                d = d.astype(jnp.float32)
                out[...] += d.T if call.leaves[n].layout == "column" else d

        outputs = [(Shape(x.leaves[n].shape, jnp.float32), call.leaves[n]) for n in learned]
        sums = _run(call, x, order, "flex_dleaves", "qkvos", more, outputs, (), visit, None)
        for n, d in zip(learned, sums, strict=True):
            grads[n] = d.astype(x.leaves[n].dtype)
    return grads


def _order_of(operand: Operand, x: jax.Array) -> tuple[str, int]:
    """Return the order that sums a gradient in consecutive steps, with the array's axes first."""
    sizes = zip("rn", x.shape if operand.layout != "whole" else (), strict=False)
    kept = "".join(axis for axis, size in sizes if size > 1)
    summed = "".join(axis for axis in "rn" if axis not in kept)
    last = {"tile": ("ij", ""), "column": ("i", "t"), "row": ("j", "t")}
    blocks, visits = last.get(operand.layout, ("", "it"))
    return kept + blocks + summed + visits, len(summed + visits)
