"""The kernels of flex: forward, and the gradients of queries, of keys and values, of the rest."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flax_mha.kernels import softmax
from flax_mha.kernels.flex.tile import FlexCall, Here, Tile
from flax_mha.kernels.flex.tile_order import Leaf, Walk
from flax_mha.kernels.softmax import finite
from flax_mha.kernels.spec import Result

Shape = jax.ShapeDtypeStruct


class Operands(NamedTuple):
    """The arrays of a call on one device; their gradients, or their layouts.

    Attributes:
      q: [R, N, T′, H]; T′ and S′ are the next multiples of the blocks.
      k: [R, K, S′, H].
      v: [R, K, S′, Hv].
      leaves: those of the spec.
      sinks: float32 [1, N, 1, 1], or None.
      closed: what its functions close over.
      verdict: what the mask says of each tile, int32 [R|1, N|1, nq, nk].
      rows: indices of the rows, int32 [R].
      heads: likewise [N].
    """

    q: Any
    k: Any
    v: Any
    leaves: list[Any]
    sinks: Any
    closed: Any
    verdict: Any
    rows: Any
    heads: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def core(call: FlexCall, recalled: Result | None, x: Operands) -> Result:
    """Gives out [R, N, T′, Hv] and lse [R, N, T′] in float32; those that are recalled, if any."""
    if recalled is not None:
        return recalled
    out, stats = _attend(call, x, x.q.dtype)
    return out, _lse(stats)


def _lse(stats: jax.Array) -> jax.Array:
    return softmax.minus_infinity(softmax.finish(stats[:, :, 0], stats[:, :, 1])[1])


def _run(
    call: FlexCall, x: Operands, axes: str, inner: int, body: Callable, name: str,
    inputs: str, more: dict[str, jax.Array], outputs: Sequence[Any], scratch: Sequence[Any] = (),
) -> Any:  # fmt: skip
    """Runs body(here, inputs, outputs, scratch) over a walk.

    Args:
      call: what is known.
      x: the arrays.
      axes: of the walk.
      inner: likewise.
      body: of the kernel, given references.
      name: of the kernel.
      inputs: of the kernel, a letter each.
      more: arrays [R, N, ·, T′] (statistics) by their letters, beside those in `x`.
      outputs: of the kernel: shapes, with their blocks as functions of the walk.
      scratch: shapes, in float32.
    """
    R, N, _, H = x.q.shape
    bq, bk, Hv = call.plan.block_q, call.plan.block_k, x.v.shape[-1]
    walk, tables = Walk.of(axes, inner, x.verdict, call.plan, call.visits, R, N)
    blocks: dict[str, Any] = {
        "q": ((bq, H), "rni."), "k": ((bk, H), "rhj."), "v": ((bk, Hv), "rhj."),
        "o": ((bq, Hv), "rni."), "s": ((3, bq), "rn.i"), "b": ((1, 1), ".n.."),
    }  # fmt: skip
    arrays = {"q": x.q, "k": x.k, "v": x.v, "b": x.sinks} | more
    own = [*zip(call.closed, x.closed, strict=True), *zip(call.leaves, x.leaves, strict=True)]
    prefetched = [x.rows, x.heads, *tables]

    def kernel(*refs: Any) -> None:
        left = iter(refs)
        counts = map(len, (prefetched, inputs, own, outputs, scratch))
        (rows, heads, *tables), ins, given, outs, kept = (
            list(itertools.islice(left, count)) for count in counts
        )
        step, first, last = walk.here(tables)
        here = Here(call, step, first, last, rows[step.r], heads[step.n], given)
        body(here, ins, outs, kept)

    specs = [walk.block((None, None, *blocks[a][0]), blocks[a][1]) for a in inputs]
    semantics: Any = ("parallel",) * (len(axes) - inner) + ("arbitrary",) * inner
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=walk.sizes,
            in_specs=[*specs, *(leaf.spec(walk, y) for leaf, y in own)],
            out_specs=[block(walk) for _, block in outputs],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=[shape for shape, _ in outputs],
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        name=name,
    )(*map(jnp.asarray, prefetched), *(arrays[a] for a in inputs), *(y for _, y in own))


def _attend(call: FlexCall, x: Operands, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Out in that dtype; each query's greatest score and sum of exponentials, [R, N, 2, T′]."""
    R, N, T, _ = x.q.shape
    bq, Hv = call.plan.block_q, x.v.shape[-1]

    def body(here: Here, inputs: Any, outputs: Any, scratch: Any) -> None:
        (q, k, v, *sinks), (out, stats), (top, total, acc) = inputs, outputs, scratch

        @pl.when(here.first)
        def _() -> None:
            acc[...] = jnp.zeros_like(acc)
            total[...] = jnp.full_like(total, 1.0 if sinks else 0.0)
            none = softmax.begin(jnp.zeros_like(top))
            top[...] = jnp.broadcast_to(sinks[0][...], top.shape) if sinks else none

        def visit(tile: Tile) -> None:
            s = tile.score(call.dot(q[...], k[...], 1, 1), tile.leaves)
            top[...], total[...], p, old = softmax.step(top[...], total[...], s)
            p = tile.drop(p).astype(v.dtype)
            acc[...] = acc[...] * old + call.dot(p, v[...], 1, 0)

        here.visit(visit)

        @pl.when(here.last)
        def _() -> None:
            whole = softmax.finish(top[...], total[...])[0]
            out[...] = (call.gain(acc[...]) / whole).astype(out.dtype)
            stats[0:1, :] = top[...].T
            stats[1:2, :] = total[...].T

    outputs = [
        (Shape((R, N, T, Hv), dtype), lambda w: w.block((None, None, bq, Hv), "rni.")),
        (Shape((R, N, 2, T), jnp.float32), lambda w: w.block((None, None, 2, bq), "rn.i")),
    ]
    inputs = "qkv" if x.sinks is None else "qkvb"
    scratch = [(bq, 1), (bq, 1), (bq, Hv)]
    return _run(call, x, "rnit", 1, body, "flex_forward", inputs, {}, outputs, scratch)


def _forward(call: FlexCall, recalled: Result | None, x: Operands) -> tuple[Result, Any]:
    if recalled is not None:
        return recalled, (x, recalled[0], jnp.stack(softmax.of_lse(recalled[1]), 2))
    # Not rounded: in δ it must cancel against products of the weights as they are.
    out, stats = _attend(call, x, jnp.float32)
    return (out.astype(x.q.dtype), _lse(stats)), (x, out, stats)


def _backward(call: FlexCall, residuals: Any, cotangents: Any) -> tuple[None, Operands]:
    x, out, stats = residuals
    top, total = stats[:, :, 0], stats[:, :, 1]
    dout, share, delta = softmax.of_rows(out, total != 0, top, total, *cotangents)
    more = {"o": dout.astype(x.q.dtype), "s": jnp.stack([top, share, delta], 2)}
    if call.guarded:
        # Factors of gradients that are 0 where masked. A NaN that was seen is in the sum.
        x = x._replace(q=finite(x.q), k=finite(x.k))
    dq = _queries(call, x, more)
    dk, dv = _keys(call, x, more)
    leaves = _leaves(call, x, more)
    sinks = None
    if x.sinks is not None:
        by_row = softmax.sink_gradient(x.sinks[:, :, 0], top, share, delta)
        sinks = by_row.sum((0, 2))[None, :, None, None]
    return None, Operands(dq, dk, dv, leaves, sinks, None, None, None, None)


core.defvjp(_forward, _backward)


def _queries(call: FlexCall, x: Operands, more: dict[str, jax.Array]) -> jax.Array:
    bq, H = call.plan.block_q, x.q.shape[-1]

    def body(here: Here, inputs: Any, outputs: Any, scratch: Any) -> None:
        (dq,), (acc,) = outputs, scratch

        @pl.when(here.first)
        def _() -> None:
            acc[...] = jnp.zeros_like(acc)

        def visit(tile: Tile) -> None:
            k = inputs[1][...]
            _, ds, _ = tile.gradient(inputs)
            acc[...] += call.dot(ds.astype(k.dtype), k, 1, 0)

        here.visit(visit)

        @pl.when(here.last)
        def _() -> None:
            dq[...] = acc[...].astype(dq.dtype)

    output = Shape(x.q.shape, x.q.dtype), lambda w: w.block((None, None, bq, H), "rni.")
    (dq,) = _run(call, x, "rnit", 1, body, "flex_dq", "qkvos", more, [output], [(bq, H)])
    return dq


def _keys(call: FlexCall, x: Operands, more: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    bk, H, Hv = call.plan.block_k, x.k.shape[-1], x.v.shape[-1]

    def body(here: Here, inputs: Any, outputs: Any, scratch: Any) -> None:
        @pl.when(here.first)
        def _() -> None:
            for acc in scratch:
                acc[...] = jnp.zeros_like(acc)

        def visit(tile: Tile) -> None:
            q, dout = inputs[0][...], inputs[3][...]
            p, ds, _ = tile.gradient(inputs)
            scratch[0][...] += call.dot(ds.astype(q.dtype), q, 0, 0)
            scratch[1][...] += call.dot(p.astype(q.dtype), dout, 0, 0)

        here.visit(visit)

        @pl.when(here.last)
        def _() -> None:
            dk, dv = outputs
            dk[...] = scratch[0][...].astype(dk.dtype)
            dv[...] = call.gain(scratch[1][...]).astype(dv.dtype)

    outputs = [
        (Shape(x.k.shape, x.k.dtype), lambda w: w.block((None, None, bk, H), "rhj.")),
        (Shape(x.v.shape, x.v.dtype), lambda w: w.block((None, None, bk, Hv), "rhj.")),
    ]
    scratch = [(bk, H), (bk, Hv)]
    dk, dv = _run(call, x, "rkjgt", 2, body, "flex_dkv", "qkvos", more, outputs, scratch)
    return dk, dv


def _leaves(call: FlexCall, x: Operands, more: dict[str, jax.Array]) -> list[jax.Array | None]:
    """The gradients of the leaves that take one, those of one layout together."""
    groups: dict[tuple[str, int], list[int]] = {}
    for n, (leaf, y) in enumerate(zip(call.leaves, x.leaves, strict=True)):
        if leaf.learned:
            groups.setdefault(_layout(leaf, y), []).append(n)
    grads: list[jax.Array | None] = [None] * len(x.leaves)
    for (axes, inner), wanted in groups.items():

        def body(here: Here, inputs: Any, outputs: Any, none: Any, wanted: Any = wanted) -> None:
            @pl.when(here.first)
            def _() -> None:
                for out in outputs:
                    out[...] = jnp.zeros_like(out)

            def visit(tile: Tile) -> None:
                _, _, found = tile.gradient(inputs, wanted)
                for n, out, d in zip(wanted, outputs, found, strict=True):
                    d = d.astype(jnp.float32)
                    out[...] += d.T if call.leaves[n].kind == "column" else d

            here.visit(visit)

        outputs = [
            (Shape(x.leaves[n].shape, jnp.float32),
             lambda w, n=n: call.leaves[n].spec(w, x.leaves[n]))
            for n in wanted
        ]  # fmt: skip
        found = _run(call, x, axes, inner, body, "flex_dleaves", "qkvos", more, outputs)
        for n, d in zip(wanted, found, strict=True):
            grads[n] = d.astype(x.leaves[n].dtype)
    return grads


def _layout(leaf: Leaf, x: jax.Array) -> tuple[str, int]:
    """The walk on which a leaf's gradient is summed in consecutive steps: its own axes first."""
    own = {"r", "n"} if leaf.kind != "whole" else set()
    own = {a for a, size in zip("rn", x.shape, strict=False) if a in own and size > 1}
    kept, summed = ("".join(a for a in "rn" if (a in own) == keep) for keep in (True, False))
    last = {"tile": ("ij", ""), "column": ("i", "t"), "row": ("j", "t")}
    blocks, visits = last.get(leaf.kind, ("", "it"))
    return kept + blocks + summed + visits, len(summed + visits)
