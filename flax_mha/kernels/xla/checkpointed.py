"""Attention with derivatives of every order and mode, in O(T + S) memory on any platform.

Tiles are planned and skipped as in `blockwise`. Each block of queries is computed under
`jax.checkpoint`, so derivatives save only its inputs. Without a custom derivative rule, forward
mode, reverse mode and their mixtures work at any order. With visit lists, the loop over tiles has a
fixed length, because JAX reverses no other loop, and `jax.lax.cond` skips empty tiles.

As the `definition`, the kernel computes in at least float32, because higher derivatives add
rounding errors. It differs in the order of sums alone.

Sources: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; Rabe and Staats,
"Self-attention Does Not Need O(n²) Memory", 2021.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from flax_mha.base import shapes, trees
from flax_mha.base.trees import combine, is_array, is_inexact
from flax_mha.kernels.call.normalizers import SOFTMAX
from flax_mha.kernels.call.spec import AttentionSpec, Lowered, Result, Sums, name_result
from flax_mha.kernels.xla import blockwise, reference, softmax, tiles
from flax_mha.kernels.xla.blockwise import map_blocks
from flax_mha.kernels.xla.tile_plan import KeyRange, Plan, VisitLists
from flax_mha.kernels.xla.tiles import TiledCall, TileIndex, Tree, compute_scores, dot
from flax_mha.masks.states import is_static
from flax_mha.sharding.shard_map import vary

# The maximum number of scores of a matmul. Derivatives hold several such arrays at once.
_MOST = 2**19


def lower(q: jax.Array, k: Any, v: Any, spec: AttentionSpec) -> Lowered:
    """Prepare the call. `reference`, with all derivatives too, computes other normalizers."""
    if spec.normalizer != SOFTMAX:
        return reference.lower(q, k, v, spec)
    return Lowered(functools.partial(attend, *spec.plain(q, k, v)))


def attend(q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec) -> Result:
    """Compute attention with derivatives of any order and mode."""
    dtype, wide = q.dtype, shapes.wide(q.dtype)
    q, k, v = (x.astype(wide) for x in (q, k, v))
    # Gradients of parameters are sums over tiles.
    parameters, others = trees.partition(spec, lambda x: is_array(x) and is_inexact(x))
    spec = combine(jax.tree.map(lambda x: x.astype(wide), parameters), others)
    out, sums = blockwise.attend(q, k, v, spec, core=_core, most=_MOST)
    return name_result(out.astype(dtype), sums)


def _core(static: TiledCall, result: None, *args: Any) -> Result:
    """Compute out [R, G·nq·bq, Hv] and sums [R, G·nq·bq]."""
    del result
    *arrays, tables = args
    if tables is not None and is_static(tables.some):
        # The maximum number of tiles that a block visits.
        tables = tables._replace(order=tables.order[..., : max(1, int(tables.some.max()))])
    return _loops(static, *arrays, tables)


@trees.trace_once
def _loops(
    static: TiledCall, q: jax.Array, k: jax.Array, v: jax.Array, leaves: Tree, others: Tree,
    sinks: jax.Array | None, tables: VisitLists | None,
) -> Result:  # fmt: skip
    """Compute attention in loops over rows and heads, blocks of queries, and tiles of keys.

    See `blockwise._loops` for the arguments.
    """
    plan, spec, dtype = static.plan, combine(leaves, others), q.dtype

    def attend_block(
        part: KeyRange, index: TileIndex, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, ...]:
        def visit(masked: bool, index: TileIndex, carry: Tree) -> Tree:
            top, total, out = carry
            tile, at = tiles.take_tile(plan, spec, index)
            keys = index.keys(k)
            s = reference.multiply(q, keys, spec.precision, dtype)
            vectors = static.vectors(spec, q, keys, dtype)
            s = compute_scores(plan, masked, index, tile, at, s, vectors)
            top, total, p, old = softmax.step(top, total, s)
            p = tile.apply_dropout(p, at)
            return top, total, out * old + dot(p, index.keys(v), 1, 0, spec, dtype)

        total = vary(jnp.zeros((plan.block_q, 1), dtype), q)
        out = vary(jnp.zeros((plan.block_q, v.shape[-1]), dtype), q)
        carry = softmax.begin(total), total, out
        top, total, out = _visit(part, plan, tables, index, visit, carry)
        total_with_sink = total
        if sinks is not None:
            new, total_with_sink = softmax.add_sink(sinks[index.head], top, total)
            out, top = out * jnp.exp(top - new), new
        # Keep NaN cotangents of fully masked queries from their weights: 0·NaN is NaN.
        divisor = softmax.divisor(total_with_sink)
        out = jnp.where(total == 0, 0.0, spec.scale_kept(out) / divisor)
        return out, top[:, 0], total_with_sink[:, 0]

    out, *sums = map_blocks(static, spec, attend_block, q, k, v, _checkpoint)
    return out, Sums(*sums)


def _checkpoint(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make derivatives of fn, of any order, save only its inputs."""
    # Reverse mode removes one checkpoint. With a second one, gradients of gradients save no scores.
    return jax.checkpoint(jax.checkpoint(fn))


def _visit(
    part: KeyRange, plan: Plan, tables: VisitLists | None, index: TileIndex,
    visit: Callable[..., Tree], carry: Tree,
) -> Tree:  # fmt: skip
    """Run carry = visit(masked, index, carry) over the tiles that a block of queries visits."""
    if tables is None:
        return visit(part.masked, index, carry)
    order, some = index.entry(tables.order), index.entry(tables.some)

    @_checkpoint
    def step(carry: Tree, t: jax.Array) -> Tree:
        def run(carry: Tree) -> Tree:
            return visit(plan.partial, index._replace(tile=order[t]), carry)

        return lax.cond(t < some, run, lambda carry: carry, carry)

    steps = jnp.arange(order.shape[0], dtype=jnp.int32)
    return lax.scan(lambda carry, t: (step(carry, t), None), carry, steps)[0]
