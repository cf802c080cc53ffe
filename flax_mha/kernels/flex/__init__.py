"""Attention under any mask and score function on TPUs: a Pallas kernel.

    out = dropout(softmax(scores(q·kᵀ·scale), over the keys that the mask allows, and the sink))·v

Memory is O(T + S), except for the arrays of masks and scores. Empty tiles are skipped, forward and
backward, and the mask is evaluated only in partial tiles. Masks and score functions, user-defined
ones included, run in the kernel (see `mosaic`), and so do the derivatives of scores. The backward
pass recomputes the scores from the saved maximum and sum, once for dq, once for dk and dv, and once
for the learned arrays of each layout over the scores. If rows and heads share a bias of
queries × keys, its gradient is summed in the kernel. XLA removes the passes that are not needed.

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

# The maximum entries of a table of tiles, in scalar memory.
TABLE = 2**16
# The maximum entries of a function's argument, in fast memory.
WHOLE = 2**17


def lower(
    q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, platform: Platform
) -> Lowered | Refusal:
    """Prepare the call, or return the reason why this kernel does not support it."""
    if reason := tpu.check(q, k, v):
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
    result: Result | None = None,
) -> Result:  # fmt: skip
    """Compute attention. Given a precomputed result, compute only its first derivatives.

    Arguments of masks and scores are converted to float32, int32, uint32 or bool.
    """
    dims = shapes.Dims.of(q, k, v)
    call = traced.call
    states = _tile_states(spec, dims, call.plan)
    if is_static(states):
        is_visited = states > EMPTY
        by_query, by_key = (max(int(np.max(is_visited.sum(axis))), 1) for axis in (-1, -2))
        full, partial = (bool((states == state).any()) for state in (FULL, PARTIAL))
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
        jnp.asarray(states, jnp.int32),
        flat_batch(at.row, dims).reshape(-1),
        at.head.reshape(-1),
    )  # fmt: skip
    if result is not None:
        out, lse = (tpu.heads_first(x, T) for x in (result[0], shapes.by_query(result[1])))
        result = out.astype(q.dtype), lse[..., 0]
    out, lse = core(call, result, operands)
    out = jnp.swapaxes(out[:, :, : dims.T], 1, 2).reshape(*dims.B, dims.T, dims.N, dims.Hv)
    return out, lse[..., : dims.T].reshape(*dims.B, dims.N, dims.T)


def _tile_states(spec: AttentionSpec, dims: Dims, plan: Plan) -> Array:
    """Return the states of the tiles under the mask, [rows|1, N|1, nq, nk]."""
    states = tile_states(spec, spec.at(dims), plan)
    xp: Any = np if is_static(states) else jnp
    if dims.T % plan.block_q:
        # The last block of queries reaches beyond the last query.
        last = (np.arange(plan.nq) == plan.nq - 1).reshape(1, 1, -1, 1) & (states == FULL)
        states = xp.where(last, np.int8(PARTIAL), states)
    for axis in (1, 0):
        if states.size > TABLE:
            # Share one table between all heads, then between all rows.
            least, most = (fn(axis, keepdims=True) for fn in (states.min, states.max))
            states = xp.where(least == most, least, np.int8(PARTIAL))
    return states


class Traced(NamedTuple):
    """A call's masks and scores as functions of tiles.

    Attributes:
      call: the static part, with `visits` and `states` for an unknown mask.
      closed: the arrays that the functions close over.
      leaves: the spec's leaves.
    """

    call: FlexCall
    closed: list[Any]
    leaves: list[Any]


def trace(spec: AttentionSpec, dims: Dims) -> Traced | str:
    """Return the functions of a call, or the reason why they cannot run in a kernel."""
    plan = _divide(spec, dims)
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
    traced = _trace_functions(jax.tree.unflatten(tree, blocks), plan)
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


def _divide(spec: AttentionSpec, dims: Dims) -> Plan:
    """Divide the scores into tiles as fine as the mask's blocks, if the table is small enough."""
    most = tpu.blocks(dims)
    least = smallest_blocks(spec.mask, spec.piece) or most
    sizes = [min(128 * -(-n // 128), size) for n, size in zip(least, most, strict=True)]
    while sizes != [*most]:
        plan = Plan(dims, sizes[0], sizes[1])
        if math.prod(dims.B) * dims.N * plan.nq * plan.nk <= TABLE:
            return plan
        # Enlarge the tiles, because a table shared by all heads would skip fewer tiles.
        axis = min((0, 1), key=lambda n: (sizes[n] == most[n], sizes[n]))
        sizes[axis] = min(2 * sizes[axis], most[axis])
    return Plan(dims, *most)


def _trace_functions(
    tile: AttentionSpec, plan: Plan
) -> tuple[tuple[Function, list], tuple[Function, list]] | str:
    """Trace the scores of a tile, without and with the mask, and return the closed-over arrays."""

    def plain(tile: AttentionSpec, at: At, s: jax.Array) -> jax.Array:
        return tile.replace(mask=None).apply(s * tile.scale, at)[0]

    def masked(tile: AttentionSpec, at: At, s: jax.Array, *inside: jax.Array) -> jax.Array:
        s = s * tile.scale
        allowed = jnp.ones((1, 1), bool) if tile.mask is None else evaluate(tile.mask, at)
        for x in inside:
            allowed = allowed & x
        allowed = jnp.broadcast_to(allowed, s.shape)
        # Masked scores must not enter the score functions (see `AttentionSpec.apply`).
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
        if lacking := function.missing_operation():
            return f"the compiler for TPUs lacks an operation of a mask or a score: {lacking}"
        functions.append((function, consts))
    return functions[0], functions[1]
