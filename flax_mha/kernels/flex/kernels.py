"""The kernels of flex: forward, and the gradients of queries, keys and values, and leaves."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flax_mha.kernels import softmax
from flax_mha.kernels.flex.tile import FlexCall, GridStep, Tile
from flax_mha.kernels.flex.tile_order import Operand, TileOrder
from flax_mha.kernels.softmax import finite
from flax_mha.kernels.spec import Result, name_result

Shape = jax.ShapeDtypeStruct


class Arrays(NamedTuple):
    """The arrays of a call on one device, or their gradients.

    Attributes:
      q: [R, N, T′, H]; T′ and S′ are T and S rounded up to whole blocks.
      k: [R, K, S′, H].
      v: [R, K, S′, Hv].
      leaves: the spec's leaves.
      sinks: float32 [1, N, 1, 1], or None.
      closed: the arrays that the functions close over.
      states: the states of the tiles, int32 [R|1, N|1, nq, nk].
      rows: the rows' indices, int32 [R].
      heads: the query heads' indices, int32 [N].
    """

    q: Any
    k: Any
    v: Any
    leaves: list[Any]
    sinks: Any
    closed: Any
    states: Any
    rows: Any
    heads: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def core(call: FlexCall, result: Result | None, x: Arrays) -> Result:
    """Return out [R, N, T′, Hv] and float32 lse [R, N, T′], precomputed or computed."""
    if result is not None:
        return result
    out, stats = _attend(call, x, x.q.dtype)
    return out, _lse(stats)


def _lse(stats: jax.Array) -> jax.Array:
    return softmax.minus_infinity(softmax.finish(stats[:, :, 0], stats[:, :, 1])[1])


def _run(
    call: FlexCall, x: Arrays, axes: str, inner: int, body: Callable, name: str,
    inputs: str, more: dict[str, jax.Array], outputs: Sequence[Any], scratch: Sequence[Any] = (),
) -> Any:  # fmt: skip
    """Run body(step, inputs, outputs, scratch) over the tiles in an order.

    `axes` and `inner` describe the order, `inputs` has a letter for each input, and `more` holds
    further inputs [R, N, ·, T′] by letter. `outputs` pairs a shape with the letter of its blocks,
    or with its `Operand`. `scratch` holds shapes of float32 arrays.
    """
    R, N, _, H = x.q.shape
    bq, bk, Hv = call.plan.block_q, call.plan.block_k, x.v.shape[-1]
    order, tables = TileOrder.of(axes, inner, x.states, call.plan, call.visits, R, N)
    blocks: dict[str, Any] = {
        "q": ((bq, H), "rni."), "k": ((bk, H), "rhj."), "v": ((bk, Hv), "rhj."),
        "o": ((bq, Hv), "rni."), "s": ((3, bq), "rn.i"), "t": ((2, bq), "rn.i"),
        "b": ((1, 1), ".n.."),
    }  # fmt: skip
    arrays = {"q": x.q, "k": x.k, "v": x.v, "b": x.sinks} | more
    operands = [*zip(call.closed, x.closed, strict=True), *zip(call.leaves, x.leaves, strict=True)]
    prefetched = [x.rows, x.heads, *tables]

    def kernel(*refs: Any) -> None:
        iterator = iter(refs)
        counts = map(len, (prefetched, inputs, operands, outputs, scratch))
        (rows, heads, *tables), ins, others, outs, sums = (
            list(itertools.islice(iterator, count)) for count in counts
        )
        tile, first, last = order.current(tables)
        step = GridStep(call, tile, first, last, rows[tile.r], heads[tile.n], others)
        body(step, ins, outs, sums)

    def place(letter: str) -> pl.BlockSpec:
        shape, axes = blocks[letter]
        return order.block((None, None, *shape), axes)

    semantics: Any = ("parallel",) * (len(axes) - inner) + ("arbitrary",) * inner
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=order.sizes,
            in_specs=[*map(place, inputs), *(operand.spec(order, y) for operand, y in operands)],
            out_specs=[place(b) if isinstance(b, str) else b.spec(order, y) for y, b in outputs],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[shape for shape, _ in outputs],
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        name=name,
    )(*map(jnp.asarray, prefetched), *(arrays[a] for a in inputs), *(y for _, y in operands))


def _attend(call: FlexCall, x: Arrays, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return out in a dtype, and each query's maximum and sum of exponentials, [R, N, 2, T′]."""
    R, N, T, _ = x.q.shape
    bq, Hv = call.plan.block_q, x.v.shape[-1]

    def body(step: GridStep, inputs: Any, outputs: Any, scratch: Any) -> None:
        (q, k, v, *sinks), (out, stats), (top, total, acc) = inputs, outputs, scratch

        @pl.when(step.first)
        def _() -> None:
            acc[...] = jnp.zeros_like(acc)
            total[...] = jnp.full_like(total, 1.0 if sinks else 0.0)
            initial = softmax.begin(jnp.zeros_like(top))
            top[...] = jnp.broadcast_to(sinks[0][...], top.shape) if sinks else initial

        def visit(tile: Tile) -> None:
            s = tile.score(call.dot(q[...], k[...], 1, 1), tile.leaves)
            top[...], total[...], p, old = softmax.step(top[...], total[...], s)
            p = tile.drop(p).astype(v.dtype)
            acc[...] = acc[...] * old + call.dot(p, v[...], 1, 0)

        step.visit(visit)

        @pl.when(step.last)
        def _() -> None:
            divisor = softmax.finish(top[...], total[...])[0]
            out[...] = (call.gain(acc[...]) / divisor).astype(out.dtype)
            stats[0:1, :] = top[...].T
            stats[1:2, :] = total[...].T

    outputs = [(Shape((R, N, T, Hv), dtype), "o"), (Shape((R, N, 2, T), jnp.float32), "t")]
    inputs = "qkv" if x.sinks is None else "qkvb"
    scratch = [(bq, 1), (bq, 1), (bq, Hv)]
    return _run(call, x, "rnit", 1, body, "flex_forward", inputs, {}, outputs, scratch)


def _forward(call: FlexCall, result: Result | None, x: Arrays) -> tuple[Result, Any]:
    if result is not None:
        return result, (x, result[0], jnp.stack(softmax.split_lse(result[1]), 2))
    # In float32, because δ must cancel with products of weights that are not rounded.
    out, stats = name_result(*_attend(call, x, jnp.float32))
    return (out.astype(x.q.dtype), _lse(stats)), (x, out, stats)


def _backward(call: FlexCall, residuals: Any, cotangents: Any) -> tuple[None, Arrays]:
    x, out, stats = residuals
    top, total = stats[:, :, 0], stats[:, :, 1]
    dout, share, delta = softmax.gradient_inputs(out, total != 0, top, total, *cotangents)
    more = {"o": dout.astype(x.q.dtype), "s": jnp.stack([top, share, delta], 2)}
    if call.guarded:
        # Masked gradients are 0, so their factors must be finite. A visible NaN is in the sum.
        x = x._replace(q=finite(x.q), k=finite(x.k))
    dq = _query_gradient(call, x, more)
    dk, dv = _key_gradients(call, x, more)
    leaves = _leaf_gradients(call, x, more)
    sinks = None
    if x.sinks is not None:
        by_row = softmax.sink_gradient(x.sinks[:, :, 0], top, share, delta)
        sinks = by_row.sum((0, 2))[None, :, None, None]
    return None, Arrays(dq, dk, dv, leaves, sinks, None, None, None, None)


core.defvjp(_forward, _backward)


def _zero_at_first(step: GridStep, sums: Sequence[Any]) -> None:
    """Set sums to 0 in the step where they begin."""

    @pl.when(step.first)
    def _() -> None:
        for acc in sums:
            acc[...] = jnp.zeros_like(acc)


def _query_gradient(call: FlexCall, x: Arrays, more: dict[str, jax.Array]) -> jax.Array:
    def body(step: GridStep, inputs: Any, outputs: Any, scratch: Any) -> None:
        (dq,), (acc,) = outputs, scratch

        _zero_at_first(step, scratch)

        def visit(tile: Tile) -> None:
            k = inputs[1][...]
            _, ds, _ = tile.gradient(inputs)
            acc[...] += call.dot(ds.astype(k.dtype), k, 1, 0)

        step.visit(visit)

        @pl.when(step.last)
        def _() -> None:
            dq[...] = acc[...].astype(dq.dtype)

    outputs = [(Shape(x.q.shape, x.q.dtype), "q")]
    scratch = [(call.plan.block_q, x.q.shape[-1])]
    (dq,) = _run(call, x, "rnit", 1, body, "flex_dq", "qkvos", more, outputs, scratch)
    return dq


def _key_gradients(
    call: FlexCall, x: Arrays, more: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    def body(step: GridStep, inputs: Any, outputs: Any, scratch: Any) -> None:
        _zero_at_first(step, scratch)

        def visit(tile: Tile) -> None:
            q, dout = inputs[0][...], inputs[3][...]
            p, ds, _ = tile.gradient(inputs)
            scratch[0][...] += call.dot(ds.astype(q.dtype), q, 0, 0)
            scratch[1][...] += call.dot(p.astype(q.dtype), dout, 0, 0)

        step.visit(visit)

        @pl.when(step.last)
        def _() -> None:
            dk, dv = outputs
            dk[...] = scratch[0][...].astype(dk.dtype)
            dv[...] = call.gain(scratch[1][...]).astype(dv.dtype)

    outputs = [(Shape(x.k.shape, x.k.dtype), "k"), (Shape(x.v.shape, x.v.dtype), "v")]
    scratch = [(call.plan.block_k, y.shape[-1]) for y in (x.k, x.v)]
    dk, dv = _run(call, x, "rkjgt", 2, body, "flex_dkv", "qkvos", more, outputs, scratch)
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
    for (axes, inner), learned in groups.items():

        def body(
            step: GridStep, inputs: Any, outputs: Any, none: Any, learned: Any = learned
        ) -> None:
            _zero_at_first(step, outputs)

            def visit(tile: Tile) -> None:
                _, _, of_tile = tile.gradient(inputs, learned)
                for n, out, d in zip(learned, outputs, of_tile, strict=True):
                    d = d.astype(jnp.float32)
                    out[...] += d.T if call.leaves[n].layout == "column" else d

            step.visit(visit)

        outputs = [(Shape(x.leaves[n].shape, jnp.float32), call.leaves[n]) for n in learned]
        sums = _run(call, x, axes, inner, body, "flex_dleaves", "qkvos", more, outputs)
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
