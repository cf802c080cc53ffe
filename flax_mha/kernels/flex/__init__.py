"""Attention under any of our masks and scores on TPUs: a kernel of our own, in Pallas.

    out = dropout(softmax(scores(q·kᵀ·scale), over the keys that the mask allows, and the sink))·v

Memory is O(T + S), beside the arrays that masks and scores hold. Tiles that the mask excludes are
skipped, forward and backward, and it is evaluated only in those that it splits. Masks and scores
are carried out in the kernel, a user's functions included (see `mosaic`), and so is the derivative
of the scores. The backward pass computes the scores again, from the saved maximum and sum, once for
dq, once for dk and dv, and once for learned arrays of each layout over the scores: where a bias of
queries × keys is shared, rows and heads are summed in the kernel. XLA leaves out what isn't asked.

Sources: Dao, "FlashAttention-2", 2023; Dong et al., "Flex Attention", 2024, for the idea; Milakov
and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flax_mha.base import shapes
from flax_mha.base.coordinates import Array, At, flat_batch, is_score_array
from flax_mha.base.shapes import Dims
from flax_mha.kernels import tpu
from flax_mha.kernels.flex.kernels import Arrays, core
from flax_mha.kernels.flex.mosaic import DTYPES, Function
from flax_mha.kernels.flex.tile import FlexCall
from flax_mha.kernels.flex.tile_order import Operand
from flax_mha.kernels.softmax import move_nan_to_keys
from flax_mha.kernels.spec import AttentionSpec, Lowered, Platform, Refusal, Result
from flax_mha.kernels.tile_plan import Plan, smallest_blocks, tile_states
from flax_mha.masks import EMPTY, FULL, PARTIAL
from flax_mha.masks.base import evaluate
from flax_mha.masks.tiles import is_static

# The most entries of a table of tiles: they lie in scalar memory.
TABLE = 2**16
# The most entries of an argument of a function, which lies whole in fast memory.
WHOLE = 2**17


def lower(
    q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, platform: Platform
) -> Lowered | Refusal:
    """Make the call ready, or return the reason why this kernel can't run it."""
    if reason := tpu.refuses(q, k, v):
        return Refusal(reason)
    if spec.precision not in _PRECISIONS:
        return Refusal(f"has the precisions default and highest, got {spec.precision}")
    traced = trace(spec, shapes.Dims.of(q, k, v))
    if isinstance(traced, str):
        return Refusal(traced)
    if platform.not_partitionable:
        return Refusal(platform.not_partitionable)
    return functools.partial(_attend, q, k, v, spec, traced)


_PRECISIONS: dict[Any, Any] = {
    None: None, "default": None, lax.Precision.DEFAULT: None,
    "highest": lax.Precision.HIGHEST, lax.Precision.HIGHEST: lax.Precision.HIGHEST,
}  # fmt: skip


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, traced: "Traced",
    recalled: Result | None = None,
) -> Result:  # fmt: skip
    """See `reference.attend`; of a recalled result only the gradients are computed.

    First derivatives only.

    Arguments of masks and scores arrive in float32, int32, uint32 or bool.
    """
    dims = shapes.Dims.of(q, k, v)
    call = traced.call
    verdict = _verdict(spec, dims, call.plan)
    if is_static(verdict):
        is_visited = verdict > EMPTY
        by_query, by_key = (max(int(np.max(is_visited.sum(axis))), 1) for axis in (-1, -2))
        full, partial = (bool((verdict == state).any()) for state in (FULL, PARTIAL))
        call = call._replace(visits=(by_query, by_key), states=(full, partial))
    if spec.mask is not None:
        k, v = move_nan_to_keys(k, v)
    T, S = call.plan.nq * call.plan.block_q, call.plan.nk * call.plan.block_k
    sinks = None
    if spec.sinks is not None:
        sinks = spec.sinks.astype(jnp.float32)[None, :, None, None]
    at = spec.at(dims)
    operands = Arrays(
        tpu.heads_first(q, T), tpu.heads_first(k, S), tpu.heads_first(v, S),
        [y.store(x, call.plan) for y, x in zip(call.leaves, traced.leaves, strict=True)],
        sinks,
        [y.store(x, call.plan) for y, x in zip(call.closed, traced.closed, strict=True)],
        jnp.asarray(verdict, jnp.int32),
        flat_batch(at.row, dims).reshape(-1),
        at.head.reshape(-1),
    )  # fmt: skip
    if recalled is not None:
        out, lse = (tpu.heads_first(x, T) for x in (recalled[0], shapes.by_query(recalled[1])))
        recalled = out.astype(q.dtype), lse[..., 0]
    out, lse = core(call, recalled, operands)
    out = jnp.swapaxes(out[:, :, : dims.T], 1, 2).reshape(*dims.B, dims.T, dims.N, dims.Hv)
    return out, lse[..., : dims.T].reshape(*dims.B, dims.N, dims.T)


def _verdict(spec: AttentionSpec, dims: Dims, plan: Plan) -> Array:
    """Return the states of the tiles under the mask, [rows|1, N|1, nq, nk]."""
    verdict = tile_states(spec, spec.at(dims), plan)
    xp: Any = np if is_static(verdict) else jnp
    if dims.T % plan.block_q:
        # The last block of queries reaches beyond the last query.
        last = (np.arange(plan.nq) == plan.nq - 1).reshape(1, 1, -1, 1) & (verdict == FULL)
        verdict = xp.where(last, np.int8(PARTIAL), verdict)
    for axis in (1, 0):
        if verdict.size > TABLE:
            # One for all heads, then for all rows, is still right.
            least, most = (fn(axis, keepdims=True) for fn in (verdict.min, verdict.max))
            verdict = xp.where(least == most, least, np.int8(PARTIAL))
    return verdict


class Traced(NamedTuple):
    """A call's masks and scores as functions of tiles.

    Attributes:
      call: with `visits` and `states` as if nothing were known of the mask.
      closed: the arrays that these functions close over.
      leaves: of the spec.
    """

    call: FlexCall
    closed: list[Any]
    leaves: list[Any]


def trace(spec: AttentionSpec, dims: Dims) -> Traced | str:
    """Return the functions of a call, or the reason why they can't run in a kernel."""
    plan = _plan(spec, dims)
    if plan.nq * plan.nk > TABLE:
        return f"divides scores into at most {TABLE} tiles, T·S = {dims.T}·{dims.S} need more"
    spec = spec.replace(sinks=None, row_ids=None, head_ids=None)
    if spec.dropout is not None:
        seed = spec.dropout.seed
        spec = spec.replace(dropout=spec.dropout.replace(seed=(seed[0], seed[1])))
    arrays, tree = jax.tree.flatten(spec)
    over_scores = [is_score_array(x) for x in jax.tree.leaves(spec, is_leaf=is_score_array)]
    for x, is_over in zip(arrays, over_scores, strict=True):
        if not is_over and (jnp.ndim(x) > 2 or jnp.size(x) > WHOLE):
            return (
                f"takes arguments of masks and scores of at most two axes and {WHOLE} entries, "
                f"got {jnp.shape(x)}"
            )
    leaves = [Operand.of(x, is_over, plan) for x, is_over in zip(arrays, over_scores, strict=True)]
    blocks = [
        jax.ShapeDtypeStruct(operand.shape if is_over else jnp.shape(x), operand.dtype)
        for operand, x, is_over in zip(leaves, arrays, over_scores, strict=True)
    ]
    traced = _functions(jax.tree.unflatten(tree, blocks), plan)
    if isinstance(traced, str):
        return traced
    (plain, first), (masked, second) = traced
    closed = [*first, *second]
    call = FlexCall(
        plan, (plan.nk, plan.nq), (True, True), plain, masked, len(first),
        tuple(Operand.of(x, False, plan) for x in closed), tuple(leaves), tree,
        spec.mask is not None, _PRECISIONS[spec.precision],
    )  # fmt: skip
    return Traced(call, closed, arrays)


def _plan(spec: AttentionSpec, dims: Dims) -> Plan:
    """Divide the scores: as finely as the mask's blocks, while its table is small enough."""
    most = tpu.blocks(dims)
    least = smallest_blocks(spec.mask) or most
    sizes = [min(128 * -(-n // 128), size) for n, size in zip(least, most, strict=True)]
    while sizes != [*most]:
        plan = Plan(dims, sizes[0], sizes[1])
        if math.prod(dims.B) * dims.N * plan.nq * plan.nk <= TABLE:
            return plan
        # One table for all heads would skip what none of them sees.
        axis = min((0, 1), key=lambda n: (sizes[n] == most[n], sizes[n]))
        sizes[axis] = min(2 * sizes[axis], most[axis])
    return Plan(dims, *most)


def _functions(
    tile: AttentionSpec, plan: Plan
) -> tuple[tuple[Function, list], tuple[Function, list]] | str:
    """Trace the scores of a tile without and with the mask; give the arrays they close over."""

    def plain(tile: AttentionSpec, at: At, s: jax.Array) -> jax.Array:
        return tile.replace(mask=None).apply(s * tile.scale, at)[0]

    def masked(tile: AttentionSpec, at: At, s: jax.Array, *inside: jax.Array) -> jax.Array:
        s = s * tile.scale
        allowed = jnp.ones((1, 1), bool) if tile.mask is None else evaluate(tile.mask, at)
        for x in inside:
            allowed = allowed & x
        allowed = jnp.broadcast_to(allowed, s.shape)
        # Masked scores must not enter the functions, see `AttentionSpec.apply`.
        s, _ = tile.replace(mask=None).apply(jnp.where(allowed, s, 0.0), at)
        return jnp.where(allowed, s, -jnp.inf)

    def aval(shape: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    q = aval((plan.block_q, 1)) if tile.q_pos is None else tile.q_pos.array
    k = aval((1, plan.block_k)) if tile.k_pos is None else tile.k_pos.array
    at, scores = At(aval((1, 1)), aval((1, 1)), q, k), (plan.block_q, plan.block_k)
    functions = []
    for fn, more in ((plain, []), (masked, [aval(scores, jnp.bool_)] if plan.ragged else [])):
        function, consts = Function.of(fn, tile, at, aval(scores, jnp.float32), *more)
        if any(x.dtype not in DTYPES or x.ndim > 2 or x.size > WHOLE for x in consts):
            shown = ", ".join(f"{x.dtype}{list(x.shape)}" for x in consts)
            return f"a function of the mask or the scores closes over arrays it can't load: {shown}"
        lacking = function.lacks()
        if lacking:
            return f"the compiler for TPUs lacks what a mask or a score does: {lacking}"
        functions.append((function, consts))
    return functions[0], functions[1]
