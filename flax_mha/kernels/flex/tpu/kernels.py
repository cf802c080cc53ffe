"""The kernels of flex for TPUs: forward, and the gradients of queries, keys, values and leaves.

The running maximum and sum of a query fill 128 equal lanes, so that no number is spread over a tile
again and again. One pass computes the gradients of q, k and v. It keeps those of a stretch of keys
in fast memory, in float32, until all queries have added to them. Its tiles are of keys × queries,
because numbers of queries are then rows, which spread for free.

The tokens of q, k, v and their gradients lie in the lanes, the features in the sublanes: libtpu
stores arrays of fewer than 128 features so, and a kernel of features in the lanes would be given
padded copies of them. The forward kernel turns each block of queries once.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flax_mha.base.coordinates import Array, At
from flax_mha.kernels.chips import tpus
from flax_mha.kernels.flex.operand import Operand
from flax_mha.kernels.flex.passes import Arrays, split
from flax_mha.kernels.flex.tile import LN2, LOG2E, FlexCall, Tile
from flax_mha.kernels.flex.tpu import rotated
from flax_mha.kernels.flex.tpu.tile_order import (
    LAST,
    Blocked,
    Step,
    TileOrder,
    Visits,
    batch_first,
    block_at,
    list_visits,
    read,
    turn,
)
from flax_mha.kernels.xla import softmax
from flax_mha.masks import FULL, PARTIAL

Shape = jax.ShapeDtypeStruct
_LANES = 128


def visits(call: FlexCall, states: Array, dtype: Any) -> tuple[Visits, Visits]:
    """Return the lists of visits of the forward pass, and of the gradients. See `Machine`."""
    forward, width = list_visits(states, call.plan, call.plan.nk), _stretch(call, dtype)
    return forward, forward if width == call.plan.nk else list_visits(states, call.plan, width)


def turns(call: FlexCall, dtype: Any) -> bool:
    """Return True if the kernels can rotate queries and keys. See `Machine`."""
    is_learned = any(operand.is_learned for operand in call.leaves)
    whole = _stretch(call, dtype) == call.plan.nk
    return whole and not is_learned and rotated.fits(call)


def _stretch(call: FlexCall, dtype: Any) -> int:
    """Return the blocks of keys that fill 7/16 of the fast memory with their gradients, or all.

    A key has a sum in float32, and a result that is stored twice while it is copied.
    """
    features = sum(_padded(n, 16) for n in (call.plan.dims.H, call.plan.dims.Hv))
    block = call.plan.block_k * features * (4 + 2 * jnp.dtype(dtype).itemsize)
    most = max(1, tpus.memory(call.device) * 7 // 16 // block)
    return -(-call.plan.nk // -(-call.plan.nk // most))


def _padded(n: int, to: int = _LANES) -> int:
    return -(-n // to) * to


def dot(call: FlexCall, a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    """Return the matmul of a and b over one axis of each, in float32."""
    if 1 in (a.shape[1 - axis_a], b.shape[1 - axis_b]):
        # The compiler multiplies a vector elementwise, and fails at that in bfloat16.
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return lax.dot_general(
        a, b, (((axis_a,), (axis_b,)), ((), ())),
        # Mosaic compiles no other precision of bfloat16, which JAX's setting may ask for.
        precision=call.precision if a.dtype == jnp.float32 else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def _spread(x: jax.Array, size: int) -> jax.Array:
    """Return [n, size] from equal lanes [n, 128]."""
    return jnp.tile(x, (1, _padded(size) // _LANES))[:, :size]


def launch(
    call: FlexCall, name: str, body: Callable, grid: Sequence[Any], inner: int, scores: int,
    prefetched: Any, inputs: Any, outputs: Any, scratch: Any = None,
    aliases: dict[int, int] | None = None,
) -> Any:  # fmt: skip
    """Run body(prefetched, inputs, outputs, scratch) at every step of a grid.

    Args:
      call: the call.
      name: the name of the kernel.
      body: the kernel, which gets trees of references.
      grid: the sizes of the grid's axes.
      inner: the number of last axes that results are summed over.
      scores: the scores that a step computes.
      prefetched: arrays in scalar memory.
      inputs: a tree of `Blocked` arrays to read.
      outputs: a tree of `Blocked` shapes of results.
      scratch: the shapes of its memory.
      aliases: the inputs that outputs replace, by number.
    """
    trees = prefetched, inputs, outputs, scratch
    (scalars, given, results, memory), forms = zip(
        *(jax.tree.flatten(x, is_leaf=lambda y: isinstance(y, Blocked)) for x in trees),
        strict=True,
    )

    def kernel(*refs: Any) -> None:
        rest = iter(refs)
        body(*(form.unflatten(itertools.islice(rest, form.num_leaves)) for form in forms))

    held = tpus.SCORE_BYTES * scores + sum(_block_bytes(x.shape, x.dtype) for x in memory)
    held += 2 * sum(_block_bytes(x.block.block_shape, x.array.dtype) for x in [*given, *results])
    semantics: Any = ("parallel",) * (len(grid) - inner) + ("arbitrary",) * inner
    found = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=tuple(grid),
            in_specs=[x.block for x in given],
            out_specs=[x.block for x in results],
            scratch_shapes=[
                pltpu.VMEM(x.shape, x.dtype) if isinstance(x, Shape) else x for x in memory
            ],
        ),
        out_shape=[x.array for x in results],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics, vmem_limit_bytes=tpus.limit(call.device, held)
        ),
        input_output_aliases={n + len(scalars): out for n, out in (aliases or {}).items()},
        name=name,
    )(*map(batch_first, [*scalars, *(x.array for x in given)]))
    return forms[2].unflatten(found)


def _block_bytes(shape: Any, dtype: Any) -> int:
    """Return the fast memory of a block, whose last two axes are padded."""
    *lead, sublanes, lanes = (n or 1 for n in shape)
    size = jnp.dtype(dtype).itemsize
    return math.prod(lead) * _padded(sublanes, 32 // size) * _padded(lanes) * size


def tile_at(
    call: FlexCall, masked: bool, operands: Sequence[Any], r: Any, n: Any, i: Any = 0, j: Any = 0
) -> Tile:
    """Return a tile in a running kernel, given references to the arrays of the call's functions.

    r and n are the indices of its row and head, and i and j of its blocks.
    """
    swapped, sizes = call.keys_first, ((call.plan.block_q, 1), (1, call.plan.block_k))
    pairs = zip((*call.closed, *call.leaves), operands, strict=True)
    q, k = (
        lax.broadcasted_iota(jnp.int32, size[::-1] if swapped else size, axis ^ swapped)
        + block * max(size)
        for axis, (size, block) in enumerate(zip(sizes, (i, j), strict=True))
    )
    row, head = (jnp.full((1, 1), index, jnp.int32) for index in (r, n))
    return Tile.of(call, masked, [read(y, ref, swapped) for y, ref in pairs], At(row, head, q, k))


def _run(
    call: FlexCall, x: Arrays, order: TileOrder, name: str, body: Callable, inputs: Any,
    outputs: Any, scratch: Any = None, aliases: dict[int, int] | None = None,
) -> Any:  # fmt: skip
    """Run body(step, tile, inputs, outputs, scratch) at every step of an order.

    tile(masked) is the tile of the step. The other arguments are those of `launch`.
    """

    def run(prefetched: Any, given: Any, outs: Any, memory: Any) -> None:
        (rows, heads, *places), (ins, operands) = prefetched, given
        step = order.current(*places)
        at = rows[step.r], heads[step.n], step.i, step.j
        body(step, lambda masked: tile_at(call, masked, operands, *at), ins, outs, memory)

    closed = x.swapped if call.keys_first else x.closed
    pairs = zip((*call.closed, *call.leaves), (*closed, *x.leaves), strict=True)
    operands = [order.shared(y, LAST[operand.layout]) for operand, y in pairs]
    return launch(
        call, name, run, order.sizes, order.inner, call.plan.block_q * call.plan.block_k,
        [x.rows, x.heads, *order.prefetched], (inputs, operands), outputs, scratch, aliases,
    )  # fmt: skip


def _visit(call: FlexCall, step: Step, visit: Callable[[bool], None]) -> None:
    """Run visit(masked) if the step's tile is not empty."""
    for state, may_be in zip((FULL, PARTIAL), call.states, strict=True):
        if may_be:
            pl.when(step.state == state)(functools.partial(visit, state == PARTIAL))


def _all_visits(call: FlexCall, x: Arrays) -> TileOrder:
    """Return the order of all visits, row by row and head by head."""
    table, count = jax.tree.map(lambda y: y[0], x.visits[0])
    return TileOrder.of("rnt", 1, table, call.plan, x.q.shape[:2], count)


def forward(call: FlexCall, x: Arrays, exact: bool) -> tuple[list[jax.Array], jax.Array]:
    """Return out, and each query's maximum and sum of exponentials. See `Machine`."""
    (R, N, H, T), Hv, f32 = x.q.shape, x.v.shape[2], jnp.float32
    parts = jax.eval_shape(lambda: split(jnp.zeros((R, N, Hv, T), f32), x.q.dtype, exact))
    bq, bk = call.plan.block_q, call.plan.block_k
    order = _all_visits(call, x)

    def body(step: Step, make: Callable, ins: Any, outs: Any, memory: Any) -> None:
        ((q, k, v), sinks, tables), (results, stats) = ins, outs
        top, total, acc, queries = memory

        @pl.when(step.begin)
        def begin() -> None:
            queries[...] = rotated.queries(call, tables, step, q).T
            least: Any = softmax.finfo_min(top.dtype)
            first = least if sinks is None else jnp.maximum(sinks[...] * LOG2E, least)
            for ref, x in (acc, 0.0), (total, float(sinks is not None)), (top, first):
                ref[...] = jnp.broadcast_to(x, ref.shape)

        def visit(masked: bool) -> None:
            tile, values, keys = make(masked), v[...], rotated.keys(call, tables, step, k)
            s = tile.score(dot(call, queries[...], keys, 1, 0), tile.leaves)
            before = top[...]
            new = jnp.maximum(before, jnp.max(s, 1, keepdims=True))
            p, old = jnp.exp2(s - _spread(new, bk)), jnp.exp2(before - new)
            total[...] = total[...] * old + jnp.sum(p, 1, keepdims=True)
            top[...] = new
            product = dot(call, tile.drop(p).astype(values.dtype), values, 1, 1)
            acc[...] = acc[...] * _spread(old, Hv) + product

        _visit(call, step, visit)

        @pl.when(step.end)
        def end() -> None:
            share = _spread(softmax.divisor(total[...]), Hv)
            out = (call.gain(acc[...]) / share).T
            for ref, part in zip(results, split(out, x.q.dtype, exact), strict=True):
                ref[...] = part
            if stats is not None:
                stats[0:1, :] = top[...].T[0:1]
                stats[1:2, :] = total[...].T[0:1]

    inputs = _inputs(x, order), *jax.tree.map(order.shared, (x.sinks, x.tables))
    numbers = order.blocks(Shape((R, N, 2, T), f32), "rn.i") if call.reads_sums else None
    outputs = [order.blocks(part, "rn.i") for part in parts], numbers
    scratch = [*(Shape((bq, n), f32) for n in (_LANES, _LANES, Hv)), Shape((bq, H), x.q.dtype)]
    found, stats = _run(call, x, order, "flex_forward", body, inputs, outputs, scratch)
    return found, softmax.unread((R, N, 2, T), found[0]) if stats is None else stats


def _gradient(
    tile: Tile, q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array, numbers: Any,
    learned: bool = False,
) -> list[Any]:  # fmt: skip
    """Return the kept weights, and the gradients of q·kᵀ and, if asked, of the leaves.

    Gradients lack a factor, see `_factor`. `numbers` are those of `Machine.gradients`.
    """
    call = tile.call

    def product(of_queries: jax.Array, of_keys: jax.Array) -> jax.Array:
        pair = (of_keys, of_queries) if call.keys_first else (of_queries, of_keys)
        return dot(call, *pair, 0, 0)

    rows = [numbers[n : n + 1, :] for n in range(3)]
    top, share, delta = rows if call.keys_first else [row.T for row in rows]

    qk, leaves = product(q, k), [tile.leaves] if learned else []
    score: Any = tile.score if learned else functools.partial(tile.score, leaves=tile.leaves)
    # The factor is the slope, and the derivative of the mask is to set those of weights of 0 to 0.
    by_weights = call.slope is not None and not learned
    s, pull = (score(qk), lambda ds: [ds]) if by_weights else jax.vjp(score, qk, *leaves)
    p = jnp.exp2(s - top) * share
    dp = call.gain(tile.drop(product(dout, v)))
    # It makes masked gradients 0, even where dp is infinite or NaN.
    masked = tile.masked and by_weights
    return [tile.drop(p), *pull(softmax.gradient(p, dp, delta, masked))]


def _factor(call: FlexCall) -> float:
    """Return the factor of the sums of a tile's gradients, from those of scores in base 2."""
    return LN2 if call.slope is None else call.slope


def gradients(
    call: FlexCall, x: Arrays, dout: jax.Array, stats: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array | None]]:
    """Return the gradients of q, k, v and the learned leaves. See `Machine`."""
    visits, f32 = x.visits[1], jnp.float32
    if len(visits[0]) == 1:
        first = jax.tree.map(lambda y: y[0], visits)
        dq, dk, dv = _stretch_gradients(call, x, dout, stats, first)
    else:
        # The gradient of the queries passes from one stretch of keys to the next.
        width = _stretch(call, x.q.dtype)

        def add(dq: jax.Array, given: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            one, start = given
            dq, dk, dv = _stretch_gradients(call, x, dout, stats, one, start, dq)
            return dq, (dk, dv)

        starts = width * jnp.arange(len(visits[0]), dtype=jnp.int32)
        wide, parts = lax.scan(add, jnp.zeros(x.q.shape, f32), (visits, starts))
        dq = wide.astype(x.q.dtype)
        dk, dv = (
            jnp.moveaxis(y, 0, 3).reshape(*y.shape[1:4], -1)[..., : x.k.shape[-1]] for y in parts
        )
    return dq, dk, dv, _leaf_gradients(call, x, dout, stats)


def _stretch_gradients(
    call: FlexCall, x: Arrays, dout: jax.Array, stats: jax.Array, visits: Visits,
    start: Any = 0, before: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Return the gradients of q, of the keys of a stretch, and of their values.

    That of q is added to the one of other stretches, float32 [R, N, H, T′], if given.
    """
    (R, N, H, _), Hv, f32 = x.q.shape, x.v.shape[2], jnp.float32
    bq, bk = call.plan.block_q, call.plan.block_k
    order = TileOrder.of("rhgt", 2, visits[0], call.plan, (R, N), visits[1], start)
    length = _stretch(call, x.q.dtype) * bk

    def body(step: Step, make: Callable, ins: Any, outs: Any, memory: Any) -> None:
        ((q, k, v, do, numbers), earlier, tables), (dq, dk, dv) = ins, outs
        dq_acc, dk_acc, dv_acc, *queries = memory
        at = block_at(step.near, bk)

        @pl.when(step.first)
        def begin_stretch() -> None:
            for ref in (dk_acc, dv_acc):
                ref[...] = jnp.zeros_like(ref)

        @pl.when(step.begin)
        def begin() -> None:
            dq_acc[...] = jnp.zeros_like(dq_acc)
            for ref in queries:
                ref[...] = rotated.queries(call, tables, step, q)

        def visit(masked: bool) -> None:
            qq, kk = (*queries, q)[0][...], rotated.keys(call, tables, step, k)
            p, ds = _gradient(make(masked), qq, kk, v[...], do[...], numbers)
            p, ds = p.astype(do.dtype), ds.astype(q.dtype)
            products = [(dk_acc, qq, ds), (dv_acc, do[...], p)]
            # libtpu's schedules are the shortest in these orders.
            for acc, a, b in reversed(products) if call.device in tpus.WIDE else products:
                acc[:, at] += dot(call, a, b, 1, 1)
            dq_acc[...] += dot(call, kk, ds, 1, 0)

        _visit(call, step, visit)

        @pl.when(step.end)
        def end() -> None:
            found = rotated.queries(call, tables, step, dq_acc, -1) * _factor(call)
            dq[...] = (found if earlier is None else earlier[...] + found).astype(dq.dtype)

        @pl.when(step.last)
        def end_stretch() -> None:
            rotated.write_gradient_of_keys(call, tables, dk, dk_acc, _factor(call))
            dv[...] = call.gain(dv_acc[...]).astype(dv.dtype)

    earlier = None if before is None else order.blocks(before, "rn.i")
    inputs, tables = _inputs(x, order, dout, stats), jax.tree.map(order.shared, x.tables)
    shapes = [Shape((*y.shape[:3], length), y.dtype) for y in (x.k, x.v)]
    like = Shape(x.q.shape, x.q.dtype if before is None else f32)
    outputs = [order.blocks(like, "rn.i"), *(order.blocks(y, "rh..") for y in shapes)]
    scratch = [Shape(shape, f32) for shape in ((H, bq), (H, length), (Hv, length))]
    scratch += [] if tables is None else [Shape((H, bq), x.q.dtype)]
    return _run(
        call.swapped, x, order, "flex_backward", body, (inputs, earlier, tables), outputs,
        scratch, None if before is None else {len(inputs): 0},
    )  # fmt: skip


def _inputs(x: Arrays, order: TileOrder, dout: Any = None, stats: Any = None) -> list[Blocked]:
    """Return the inputs of a kernel: q, k, v and, for gradients, dout and numbers of queries."""
    pairs = (x.q, "rn.i"), (x.k, "rh.j"), (x.v, "rh.j"), (dout, "rn.i"), (stats, "rn.i")
    return [order.blocks(y, axes) for y, axes in pairs if y is not None]


def _leaf_gradients(
    call: FlexCall, x: Arrays, dout: jax.Array, stats: jax.Array
) -> list[jax.Array | None]:
    """Return the gradients of the learned leaves, in passes that XLA leaves out if it can.

    Those of queries × keys are computed in memory of their size, and the others for each row and
    head.
    """
    grads: list[jax.Array | None] = [None] * len(x.leaves)
    learned = [n for n, operand in enumerate(call.leaves) if operand.is_learned]
    tiles = [n for n in learned if call.leaves[n].layout == "tile"]
    rest = [n for n in learned if n not in tiles]
    passes = [(_all_visits(call, x), rest)] if rest else []
    for n in tiles:
        kept = "".join(a for a, size in zip("rn", x.leaves[n].shape, strict=False) if size > 1)
        summed = "".join(a for a in "rn" if a not in kept)
        letters = kept + "ij" + summed
        order = TileOrder.of(letters, len(summed), x.states, call.plan, x.q.shape[:2])
        passes.append((order, [n]))
    for order, found in passes:
        for n, d in zip(found, _sum_gradients(call, x, order, found, dout, stats), strict=True):
            grads[n] = d
    return [*map(sum_shared, call.leaves, grads, x.leaves)]


def sum_shared(operand: Operand, d: jax.Array | None, x: jax.Array) -> jax.Array | None:
    """Return the gradient of an operand's array, from those of rows and heads that share it."""
    if d is None:
        return None
    axes = [a for a in (0, 1) if operand.layout == "whole" or x.shape[a] == 1]
    return d.sum(axes, keepdims=True).reshape(x.shape).astype(x.dtype)


def _sum_gradients(
    call: FlexCall, x: Arrays, order: TileOrder, learned: list[int], dout: jax.Array,
    stats: jax.Array,
) -> list[jax.Array]:  # fmt: skip
    """Return the gradients of leaves, summed over the inner axes of an order."""
    bq, bk = call.plan.block_q, call.plan.block_k

    def body(step: Step, make: Callable, ins: Any, outs: Any, _: Any) -> None:
        q, k, v, do, numbers = ins

        @pl.when(step.first)
        def begin() -> None:
            for out in outs:
                out[...] = jnp.zeros_like(out)

        def visit(masked: bool) -> None:
            args = make(masked), q[...], k[...], v[...], do[...], numbers
            _, _, of_leaves = _gradient(*args, learned=True)
            for n, out in zip(learned, outs, strict=True):
                operand, everywhere = call.leaves[n], slice(None)
                places = {"column": block_at(step.i, bq), "row": block_at(step.j, bk)}
                at = everywhere, places.get(operand.layout, everywhere)
                out[at] += LN2 * turn(operand, of_leaves[n].astype(jnp.float32), swapped=False)

        _visit(call, step, visit)

    outputs = []
    for n in learned:
        operand, y = call.leaves[n], x.leaves[n]
        lead = y.shape[:-2] if operand.layout == "tile" else x.q.shape[:2]
        last = "ij" if operand.layout == "tile" else ".."
        outputs.append(order.shared(Shape((*lead, *y.shape[-2:]), jnp.float32), last))
    return _run(call, x, order, "flex_dleaves", body, _inputs(x, order, dout, stats), outputs)
