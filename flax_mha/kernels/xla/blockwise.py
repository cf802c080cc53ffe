"""Flash attention in O(T + S) memory on any platform, forward and backward.

The mask first gives the state of each tile of scores (see `tile_plan`). If the states are static
and a block of queries sees adjacent keys, one matmul covers them all. Otherwise the kernel visits
tiles one by one, with an online softmax. It skips empty tiles, and evaluates the mask only in
partial ones. The backward pass computes scores again from the saved maximum and sum.

In half precision, except on CPUs that compute in float32, exponentials are rounded before their
matmul with the values, and the scale may round q.

The loops, from outer to inner: batch rows and key/value heads, several at once if matmuls would be
small; query heads of the group and blocks of queries; tiles of keys, full ones before partial ones.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Rabe and Staats,
"Self-attention Does Not Need O(n²) Memory", 2021; Dao, "FlashAttention-2", 2023.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flax_mha.base import loops, numerics, shapes, trees
from flax_mha.base.trees import combine, is_inexact, partition
from flax_mha.kernels.call import limits
from flax_mha.kernels.call.spec import AttentionSpec, Lowered, Result, Sums, name_result
from flax_mha.kernels.chips.cpus import computes_in_bfloat16
from flax_mha.kernels.xla import softmax, tile_plan, tiles
from flax_mha.kernels.xla.tile_plan import KeyRange, VisitLists
from flax_mha.kernels.xla.tiles import TiledCall, TileIndex, Tree
from flax_mha.sharding.shard_map import vary

# The maximum number of scores of a matmul with `remat`: derivatives hold several such arrays.
_MOST_IN_REMAT = 2**19


def lower(q: jax.Array, k: Any, v: Any, spec: AttentionSpec) -> Lowered:
    """Prepare the call. This kernel supports every call with a softmax."""
    limits.check(spec, q, k, vectors=True, blocks=True, symbolic=True)
    return Lowered(functools.partial(attend, *spec.plain(q, k, v)), takes_result=True)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, result: Result | None = None,
    remat: bool = False,
) -> Result:  # fmt: skip
    """Compute attention of q [*B, T, N, H] to k [*B, S, K, H] and v [*B, S, K, Hv].

    If a `result` over these and other keys is given, only its gradients are computed. With `remat`,
    JAX derives the loops. Otherwise there is a custom derivative rule: forward mode works only over
    gradients, and gradients of gradients only without visit lists.
    """
    dims, dtype = shapes.Dims.of(q, k, v), q.dtype
    B, T, S, N, K, _, Hv = dims
    if 0 in q.shape or S == 0:
        return tiles.empty_result(dims, dtype, spec.sinks)
    plan, tables = tile_plan.plan_call(spec, dims, _MOST_IN_REMAT if remat else tile_plan.MOST)
    scale = 1.0
    if remat:
        # Higher derivatives add rounding errors. Gradients of parameters are sums over tiles.
        q, k, v, spec = jax.tree.map(_widen, (q, k, v, spec))
    if isinstance(spec.scale, float) and computes_in_bfloat16(q.dtype, q.shape[-3], k.shape[-3]):
        # Scaling q would round it once more.
        scale = spec.scale
    else:
        if spec.platform.name == "cpu":
            # Convert once here, not in every tile.
            q, k, v = (x.astype(shapes.wide(dtype)) for x in (q, k, v))
        q = numerics.scaled(q, spec.scale)
    sinks, spec = spec.sinks, tiles.tile_spec(spec.replace(scale=None, sinks=None), plan)
    static = TiledCall.of(plan, spec, scale, remat)
    fold_q, fold_k = (
        functools.partial(tiles.fold_heads, block=block, K=K)
        for block in (plan.block_q, plan.block_k)
    )
    args: Any = fold_q(q), fold_k(k), fold_k(v), *partition(spec, is_inexact), tables
    args = jax.tree.map(lambda x: vary(x, args), args)
    if result is not None:
        sums = Sums(*(fold_q(shapes.by_query(x))[..., 0] for x in result[1]))
        result = fold_q(result[0].astype(sums.total.dtype)), sums
    out, sums = _forward(static, None, *args)[0] if remat else _core(static, result, *args)
    out = out.reshape(*B, N, plan.nq * plan.block_q, Hv)[..., :T, :]
    sums = Sums(*(x.reshape(*B, N, plan.nq * plan.block_q)[..., :T] for x in sums))
    merged = jnp.swapaxes(out, -3, -2), sums
    out, sums = merged if sinks is None else softmax.merge_sinks(merged, sinks)
    return out.astype(dtype), sums


def _widen(x: Any) -> Any:
    is_float = isinstance(x, jax.Array) and is_inexact(x)
    return x.astype(shapes.wide(x.dtype)) if is_float else x


def _checkpoint(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make derivatives of fn, of any order, save only its inputs."""
    # Reverse mode removes one checkpoint. With a second one, gradients of gradients save no scores.
    return jax.checkpoint(jax.checkpoint(fn))


def _visit(
    static: TiledCall, part: KeyRange, tables: VisitLists | None, index: TileIndex,
    step: Callable[..., Tree], carry: Tree,
) -> Tree:  # fmt: skip
    """Run carry = step(masked, index, carry) over the tiles that a block of queries visits."""
    if tables is None:
        return step(part.masked, index, carry)

    order, full, some = (index.entry(x) for x in tables)

    def body(masked: bool, t: jax.Array, carry: Tree) -> Tree:
        return step(masked, index._replace(tile=order[t]), carry)

    if static.remat:
        # JAX reverses only loops of a fixed length.
        @_checkpoint
        def visit(carry: Tree, t: jax.Array) -> tuple[Tree, None]:
            run = functools.partial(body, static.plan.partial, t)
            return lax.cond(t < some, run, lambda carry: carry, carry), None

        return lax.scan(visit, carry, jnp.arange(order.shape[0], dtype=jnp.int32))[0]
    if static.plan.full:
        carry = loops.repeat(0, full, functools.partial(body, False), carry)
    if static.plan.partial:
        carry = loops.repeat(full, some, functools.partial(body, True), carry)
    return carry


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _core(static: TiledCall, result: Result | None, *args: Any) -> Result:
    """Return out [R, G·nq·bq, Hv] and sums [R, G·nq·bq], given or computed."""
    return _forward(static, result, *args)[0]


@trees.trace_once
def _loops(
    static: TiledCall, q: jax.Array, k: jax.Array, v: jax.Array, leaves: Tree, others: Tree,
    tables: VisitLists | None,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Return out [R, G·nq·bq, Hv], maximum scores and sums of exponentials [R, G·nq·bq], in loops.

    q, scaled, is [R, G·nq·bq, H] for R rows × key/value heads; k and v are [R, nk·bk, ·]. `leaves`
    are the spec's learned leaves, `others` the remaining ones. `tables` are None for the plan's
    ranges of keys. Exponentials are of scores minus their maximum.
    """
    plan, spec = static.plan, combine(leaves, others)
    acc = shapes.wide(q.dtype)

    def group(_: Any, x: tuple[jax.Array, ...]) -> tuple[Any, tuple[jax.Array, ...]]:
        r, q, k, v = x
        q, (k, v) = tiles.split_blocks(plan, q), tiles.split_tiles(plan, k, v)
        row = TileIndex.of_row(plan, r)

        def job(part: KeyRange, k: jax.Array, v: jax.Array, none: Any, x: Tree) -> Any:
            j, q = x

            def step(masked: bool, index: TileIndex, carry: Tree) -> Tree:
                top, total, out = carry
                tile, at = tiles.take_tile(plan, spec, index)
                keys = index.keys(k)
                s = static.apply_scale(tiles.dot(q, keys, 1, 1, spec, acc))
                vectors = static.vectors(spec, q, keys, acc)
                s = tiles.compute_scores(plan, masked, index, tile, at, s, vectors)
                top, total, p, old = softmax.step(top, total, s)
                p = tile.apply_dropout(p, at).astype(v.dtype)
                more = tiles.dot(p, index.keys(v), 1, 0, spec, acc)
                return top, total, more if old is None else lax.add(lax.mul(out, old), more)

            total = vary(jnp.zeros((plan.block_q, 1), acc), q)
            carry: Tree = softmax.begin(total), None, None
            if tables is not None:
                carry = carry[0], total, vary(jnp.zeros((plan.block_q, v.shape[-1]), acc), q)
            index = row.of_job(plan, part, j)
            top, total, out = _visit(static, part, tables, index, step, carry)
            out = spec.scale_kept(out) / softmax.divisor(total)
            if static.remat:
                # Keep NaN cotangents of fully masked queries from their weights: 0·NaN is NaN.
                out = jnp.where(total == 0, 0.0, out)
            return none, (out, *(lax.squeeze(x, (1,)) for x in (top, total)))

        parts = []
        for part in plan.parts:
            run = functools.partial(job, part)
            run = functools.partial(_checkpoint(run) if static.remat else run, k, v)
            count = part.count_blocks(plan.nq)
            parts.append(_scan_blocks(run, [], [q], part.first, count)[1])
        return [], tuple(tiles.join(x) for x in zip(*parts, strict=True))

    xs = (jnp.arange(q.shape[0], dtype=jnp.int32), q, k, v)
    results: tuple[jax.Array, ...] = _scan_or_map(group, [], xs, static.together)[1]
    return results


def _forward(static: TiledCall, result: Result | None, *args: Any) -> tuple[Result, Any]:
    if result is not None:
        return result, (args, result[0], *result[1])
    out, top, total = _loops(static, *args)
    out, sums = name_result(out, Sums(top, total))
    return (out, sums), (args, out, *sums)


@trees.trace_once
def _backward(static: TiledCall, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    """Compute the gradients of all arguments of `_core` except the first."""
    (q, k, v, leaves, others, tables), out, top, total = residuals
    plan, spec, acc = static.plan, combine(leaves, others), total.dtype
    dout, *by_query = softmax.gradient_inputs(out, total != 0, top, total, *cotangents)
    stats = jnp.stack(by_query, -1)

    def group(grads: Tree, x: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        r, q, dout, stats, k, v = x
        q, dout, stats = (tiles.split_blocks(plan, x) for x in (q, dout, stats))
        k, v = tiles.split_tiles(plan, k, v)
        row = TileIndex.of_row(plan, r)

        def job(part: KeyRange, carry: Tree, x: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
            j, q, qT, dout, doutT, stats = x

            def step(masked: bool, index: TileIndex, carry: Tree) -> Tree:
                grads, dq, dkT, dvT = carry
                p, ds, dleaves, dvectors = tiles.tile_gradient(
                    static, masked, index, spec, q, index.keys(k), index.keys(v), dout, stats,
                )  # fmt: skip
                # Without the barrier, XLA:CPU recomputes p and ds for each matmul.
                p, ds = lax.optimization_barrier((p.astype(v.dtype), ds.astype(q.dtype)))
                dq = lax.add(dq, tiles.dot(ds, index.keys(k), 1, 0, spec, acc))
                # Transpose the small factor: XLA:CPU is slow with the large one transposed.
                dkT = index.add_keys(dkT, tiles.dot(qT, ds, 1, 0, spec, acc))
                dvT = index.add_keys(dvT, tiles.dot(doutT, p, 1, 0, spec, acc))
                if dvectors is not None:
                    dq, dkT = dq + dvectors[0], index.add_keys(dkT, dvectors[1].T)
                return tiles.add_grads(index, grads, dleaves), dq, dkT, dvT

            carry = (carry[0], vary(jnp.zeros(q.shape, acc), q), *carry[1:])
            index = row.of_job(plan, part, j)
            grads, dq, dkT, dvT = _visit(static, part, tables, index, step, carry)
            return (grads, dkT, dvT), dq.astype(q.dtype)

        blocks = q, jnp.swapaxes(q, -1, -2), dout, jnp.swapaxes(dout, -1, -2), stats
        carry: Tree = (grads, *(vary(tiles.init_key_sums(plan, x, acc), q) for x in (k, v)))
        parts: list[jax.Array] = []
        # Start with the last part, the widest under a causal mask: dk and dv need no padding.
        for part in reversed(plan.parts):
            run, count = functools.partial(job, part), part.count_blocks(plan.nq)
            carry, dq = _scan_blocks(run, carry, blocks, part.first, count)
            parts.insert(0, dq)
        grads, dkT, dvT = carry
        dk = tiles.join_key_sums(dkT).astype(k.dtype)
        dv = tiles.join_key_sums(spec.scale_kept(dvT)).astype(v.dtype)
        return grads, (tiles.join(parts), dk, dv)

    zeros = jax.tree.map(lambda x: vary(jnp.zeros(x.shape, acc), q), leaves)
    xs = (jnp.arange(q.shape[0], dtype=jnp.int32), q, dout.astype(v.dtype), stats, k, v)
    grads, (dq, dk, dv) = _scan_or_map(group, zeros, xs, static.together)
    grads = jax.tree.map(lambda g, x: g.astype(x.dtype), grads, leaves)
    return None, dq, dk, dv, grads, None, None


_core.defvjp(_forward, _backward)


def _scan_blocks(
    job: Callable[[Any, Any], Any], carry: Any, xs: Sequence[jax.Array], first: int, count: int
) -> Any:
    """Scan carry, result = job(carry, (index, *blocks)) over blocks of xs [G, blocks, ...].

    Take `count` blocks from `first` on. Return the last carry, and the results [G, count, ...].
    """
    G, length = xs[0].shape[:2]
    if count != length:
        xs = [lax.slice_in_dim(x, first, first + count, 1, 1) for x in xs]
    if G == 1 and count == 1:
        carry, result = job(carry, (np.int32(0), *(lax.squeeze(x, (0, 1)) for x in xs)))
        return carry, jax.tree.map(lambda x: lax.expand_dims(x, (0, 1)), result)
    flat = [lax.collapse(x, 0, 2) for x in xs]
    carry, results = loops.scan(job, carry, (jnp.arange(G * count, dtype=jnp.int32), *flat))
    return carry, jax.tree.map(lambda x: x.reshape(G, count, *x.shape[1:]), results)


def _scan_or_map(group: Callable[[Any, Any], Any], sums: Any, xs: Any, together: int) -> Any:
    """Scan sums, results = group(sums, x) over xs. Without sums, map `together` entries at once."""
    if jax.tree.leaves(sums) or together == 1:
        return loops.scan(group, sums, xs)
    return sums, loops.map_blocks(lambda x: group(sums, x)[1], xs, (), together)
