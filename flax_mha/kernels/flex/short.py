"""Attention over short sequences on TPUs: a Pallas kernel of whole rows of scores.

    out = dropout(softmax(scores(q·kᵀ·scale), over the keys that the mask allows, and the sink))·v

A step computes some heads of one row, with all scores in fast memory. It reads q, k and v as the
projections write them, [T, N·H], so nothing is transposed, and small heads are not padded to 128
features. The backward pass keeps only q, k and v, and computes the softmax again. Masks and scores
run as in `flex`. Weights are rounded to the dtype of the values before their matmul.

Source: Dao et al., "FlashAttention", 2022, for the recomputation.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flax_mha.base.coordinates import flat_batch
from flax_mha.base.shapes import Dims
from flax_mha.kernels.call import limits
from flax_mha.kernels.call.spec import AttentionSpec, Lowered, Result, Sums, Unsupported, load
from flax_mha.kernels.call.stored import dequantize
from flax_mha.kernels.chips import tpus
from flax_mha.kernels.flex.passes import Arrays
from flax_mha.kernels.flex.tile import FlexCall
from flax_mha.kernels.flex.traced import trace
from flax_mha.kernels.xla.tile_plan import Plan

# The scores of a step. More heads hide more of each other's latencies, until they fill the memory.
_SCORES = 3 * 2**18


def lower(q: jax.Array, k: Any, v: Any, spec: AttentionSpec) -> Lowered:
    """Prepare the call, or raise the reason why this kernel does not support it."""
    limits.check(spec, q, k)
    k, v, platform = dequantize(k), dequantize(v), spec.platform
    dims = Dims.of(q, k, v)
    if reason := tpus.check(q, k, v):
        raise Unsupported(reason)
    # Pallas is loaded only when a call asks for it.
    machine, kernel = load("flex.tpu").MACHINE, load("flex.tpu.whole_rows")
    if max(dims.T, dims.S) > tpus.SHORT:
        raise Unsupported(f"takes at most {tpus.SHORT} queries and keys, got {dims.T} and {dims.S}")
    traced = trace(spec, Plan(dims, dims.T, dims.S), machine, platform.device)
    if isinstance(traced, str):
        raise Unsupported(traced)
    call, (_, closed), leaves = traced
    states = spec.mask is None, spec.mask is not None
    for operand, x in zip(call.leaves, leaves, strict=True):
        if operand.is_learned and operand.layout == "tile" and math.prod(x.shape[:-3]) > 1:
            raise Unsupported(f"shares float arrays over the scores among rows, got {x.shape}")
    if platform.not_partitionable:
        raise Unsupported(platform.not_partitionable)
    # The other half of the memory holds blocks of q, k, v and the arrays of scores.
    most = tpus.memory(platform.device) // 2 // tpus.SCORE_BYTES
    of_head = kernel.scores_of(dims)
    heads = _heads(dims, of_head, most)
    if heads * dims.G * of_head > most:
        raise Unsupported(
            f"holds at most {most} scores in fast memory, got {heads * dims.G} heads of "
            f"{dims.T} × {dims.S}"
        )
    q, k, spec = spec.turned(q, k)
    run = functools.partial(
        _attend, kernel, q, k, v, spec, heads, call.swapped._replace(states=states), closed, leaves
    )
    return Lowered(run)


def _heads(dims: Dims, scores: int, most: int) -> int:
    """Return the key/value heads of a step: all, or fewer that fill whole registers."""
    fitting = [
        n for n in range(1, dims.K + 1)
        if n == dims.K or not (dims.K % n or n * dims.H % 128 or n * dims.Hv % 128)
    ]  # fmt: skip
    most = min(most, _SCORES) // (dims.G * scores)
    return max((n for n in fitting if n <= most), default=fitting[0])


def _attend(
    kernel: Any, q: jax.Array, k: jax.Array, v: jax.Array, spec: AttentionSpec, heads: int,
    call: FlexCall, closed: Sequence[Any], leaves: Sequence[Any],
) -> Result:  # fmt: skip
    """Compute attention, with the functions and arrays of `trace` for tiles of keys × queries."""
    dims, at = call.plan.dims, spec.at(call.plan.dims)
    of_leaves, of_functions = (
        [y.store(x, call.plan) for y, x in zip(operands, arrays, strict=True)]
        for operands, arrays in ((call.leaves, leaves), (call.closed, closed))
    )
    sinks = None if spec.sinks is None else spec.sinks.astype(jnp.float32)[None, :, None, None]
    rows, numbers = flat_batch(at.row, dims).reshape(-1), at.head.reshape(-1)
    flat_q, flat_k, flat_v = (
        x.reshape(-1, x.shape[-3], math.prod(x.shape[-2:])) for x in (q, k, v)
    )
    x = Arrays(flat_q, flat_k, flat_v, of_leaves, sinks, of_functions, rows, numbers)
    out, sums = kernel.core(call, heads, x)
    by_query = (sums[:, :, n].reshape(*dims.B, dims.N, dims.T) for n in range(2))
    return out.reshape(*dims.B, dims.T, dims.N, dims.Hv), Sums(*by_query)
