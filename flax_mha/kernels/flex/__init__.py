"""Attention under any mask and score function on TPUs and NVIDIA GPUs: Pallas kernels.

    out = dropout(softmax(scores(q·kᵀ·scale), over the keys that the mask allows, and the sink))·v

It is `reference`, except that exponentials are rounded to the dtype of the values before their
matmul and divided by their sum after it. Memory is O(T + S), plus the arrays of masks and scores.

Empty tiles are skipped, and only partial tiles evaluate the mask. Masks and score functions run in
the kernel, also a user's own, and so do their derivatives. The backward pass computes scores again:
on TPUs once for dq, dk and dv, and once more for each learned array, whose memory it takes. On TPUs
the kernel can also rotate queries and keys. The layer rotates them if something else reads them (a
cache, a capture, an edit), with learned scores, over a sharded sequence, and if the tables of
cosines would take more than a third of the fast memory.

A hidden score becomes −∞ before the softmax, and the derivative of the mask sets its gradient to 0,
even where a product overflows.

Sources: Dao, "FlashAttention-2", 2023; Dong et al., "Flex Attention", 2024, for the idea; Milakov
and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha.base import shapes
from flax_mha.base.coordinates import Array, flat_batch
from flax_mha.base.shapes import Dims
from flax_mha.kernels.call import limits
from flax_mha.kernels.call.spec import AttentionSpec, Lowered, Result, Sums, Unsupported, load
from flax_mha.kernels.call.stored import dequantize
from flax_mha.kernels.chips.tpus import heads_first
from flax_mha.kernels.flex.passes import Arrays, Tables, core
from flax_mha.kernels.flex.tile import FlexCall, Machine
from flax_mha.kernels.flex.traced import divide, trace
from flax_mha.kernels.xla.tile_plan import Plan, tile_states
from flax_mha.masks import FULL, PARTIAL
from flax_mha.masks.states import is_static
from flax_mha.positions.turn import Turn

# The module of each platform's part, loaded when a call asks for it.
_MACHINES = {"tpu": "flex.tpu", "gpu": "flex.hopper"}


def lower(q: jax.Array, k: Any, v: Any, spec: AttentionSpec) -> Lowered:
    """Prepare the call, or raise the reason why this kernel does not support it."""
    limits.check(spec, q, k, blocks=True)
    k, v, platform = dequantize(k), dequantize(v), spec.platform
    machine: Machine = load(_MACHINES[platform.name]).MACHINE
    if reason := machine.check(q, k, v, platform):
        raise Unsupported(reason)
    if any(spec.blocks):
        if not machine.whole_tiles:
            raise Unsupported(f"has tiles of one size on NVIDIA GPUs, got {spec.blocks}")
        if any((size or 0) % 128 for size in spec.blocks):
            raise Unsupported(f"takes blocks of multiples of 128, got {spec.blocks}")
    dims = shapes.Dims.of(q, k, v)
    plan, why = divide(spec, dims, machine, platform.device)
    if plan.nq * plan.nk > machine.table:
        raise Unsupported(
            f"divides scores into at most {machine.table} tiles, T·S = {dims.T}·{dims.S} need more"
        )
    traced = trace(spec, plan, machine, platform.device)
    if isinstance(traced, str):
        raise Unsupported(traced)
    if platform.not_partitionable:
        raise Unsupported(platform.not_partitionable)
    if not machine.turns(traced[0], q.dtype):
        q, k, spec = spec.turned(q, k)
    call = functools.partial(_attend, q, k, v, spec, *traced)
    return Lowered(call, True, (plan.block_q, plan.block_k), why)


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, call: FlexCall,
    closed: Sequence[Sequence[Any]], leaves: Sequence[Any], result: Result | None = None,
) -> Result:  # fmt: skip
    """Compute attention for the results of `trace`.

    Given a precomputed result, compute only its first derivatives. Arguments of masks and scores
    are converted to float32, int32, uint32 or bool.
    """
    dims = shapes.Dims.of(q, k, v)
    states = _tile_states(spec, dims, call.plan, call.machine.table)
    if is_static(states):
        full, partial = (bool((states == state).any()) for state in (FULL, PARTIAL))
        call = call._replace(states=(full, partial))
    T, S = call.plan.padded
    sinks = None
    if spec.sinks is not None:
        sinks = spec.sinks.astype(jnp.float32)[None, :, None, None]
    at = spec.at(dims)
    calls = zip((call, call.swapped), (*closed, [])[:2], strict=True)
    first, second = (
        [y.store(x, call.plan) for y, x in zip(one.closed if one else (), given, strict=True)]
        for one, given in calls
    )
    lanes = call.machine.lanes
    operands = Arrays(
        heads_first(q, T, lanes),
        heads_first(k, S, lanes),
        heads_first(v, S, lanes),
        [y.store(x, call.plan) for y, x in zip(call.leaves, leaves, strict=True)],
        sinks,
        first,
        flat_batch(at.row, dims).reshape(-1),
        at.head.reshape(-1),
        second,
        jnp.asarray(states, jnp.int32),
        call.machine.visits(call, states, q.dtype),
        _tables(spec, q, (T, S)),
    )  # fmt: skip
    if result is not None:
        given = Sums(*(heads_first(shapes.by_query(x), T)[..., 0] for x in result[1]))
        result = heads_first(result[0], T, lanes).astype(q.dtype), given
    out, sums = core(call, result, operands)
    out = out.transpose((0, 3, 1, 2) if lanes else (0, 2, 1, 3))[:, : dims.T]
    out = out.reshape(*dims.B, dims.T, dims.N, dims.Hv)
    return out, Sums(*(x[..., : dims.T].reshape(*dims.B, dims.N, dims.T) for x in sums))


def _tables(spec: AttentionSpec, q: jax.Array, lengths: tuple[int, int]) -> Tables | None:
    """Return the tables of a rotation in the kernel, padded to the lengths."""
    if spec.turns is None:
        return None

    def stored(turn: Turn, length: int) -> tuple[jax.Array, jax.Array]:
        halves = [turn.cos.array, turn.sin.array]
        given = turn.tables(q.shape[-1]) if turn.interleaved else halves
        flat = (jnp.asarray(flat_batch(x, Dims.of(q, q, q))) for x in given)
        cos, sin = (heads_first(x.swapaxes(1, 2), length, True) for x in flat)
        return cos, sin

    return Tables(*map(stored, spec.turns, lengths))


def _tile_states(spec: AttentionSpec, dims: Dims, plan: Plan, table: int) -> Array:
    """Return the states of the tiles under the mask, [rows|1, N|1, nq, nk]."""
    states = tile_states(spec, spec.at(dims), plan)
    xp: Any = np if is_static(states) else jnp
    if dims.T % plan.block_q:
        # The last block of queries reaches beyond the last query.
        last = (np.arange(plan.nq) == plan.nq - 1).reshape(1, 1, -1, 1) & (states == FULL)
        states = xp.where(last, np.int8(PARTIAL), states)
    for axis in (1, 0):
        if states.size > table:
            # Share one table between all heads, then between all rows.
            least, most = (fn(axis, keepdims=True) for fn in (states.min, states.max))
            states = xp.where(least == most, least, np.int8(PARTIAL))
    return states
