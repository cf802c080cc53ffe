"""Queries and keys that are rotated in fast memory.

A block of queries is rotated where its first tile begins, and a block of keys in each tile: the
partners of a pair are sublanes, so that no number moves between lanes. The tables of cosines and
sines stay in fast memory for all heads.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from flax_mha.kernels.chips import tpus
from flax_mha.kernels.flex.passes import Tables
from flax_mha.kernels.flex.tile import FlexCall
from flax_mha.kernels.flex.tpu.tile_order import Step, block_at


def fits(call: FlexCall) -> bool:
    """Return True if the tables fit in a third of the fast memory."""
    # There are two tables, and all blocks that a kernel loads are stored twice.
    held = 2 * 2 * 4 * sum(call.plan.padded) * call.plan.dims.H
    return held <= tpus.memory(call.device) // 3


def queries(call: FlexCall, tables: Tables | None, step: Step, q: Any) -> jax.Array:
    """Return the queries [H, block] of a step."""
    if tables is None:
        return q[...]
    x = _rotate(call, q[...], tables.q, block_at(step.i, call.plan.block_q))
    return x.astype(q.dtype)


def keys(call: FlexCall, tables: Tables | None, step: Step, k: Any) -> jax.Array:
    """Return the keys [H, block] of a step."""
    if tables is None:
        return k[...]
    x = _rotate(call, k[...], tables.k, block_at(step.j, call.plan.block_k))
    return x.astype(k.dtype)


def gradient_of_queries(
    call: FlexCall, tables: Tables | None, step: Step, gradients: Any
) -> jax.Array:
    """Return the gradients of a block of queries before their rotation, from those after it."""
    if tables is None:
        return gradients[...]
    return _rotate_back(call, gradients[...], tables.q, block_at(step.i, call.plan.block_q))


def write_gradient_of_keys(call: FlexCall, tables: Tables | None, dk: Any, gradients: Any) -> None:
    """Write the gradients of all keys before their rotation, from those after it."""
    if tables is None:
        dk[...] = gradients[...].astype(dk.dtype)
        return

    def write(j: jax.Array, _: None) -> None:
        at = block_at(j, call.plan.block_k)
        dk[:, at] = _rotate_back(call, gradients[:, at], tables.k, at).astype(dk.dtype)

    lax.fori_loop(0, call.plan.nk, write, None)


def _rotate(call: FlexCall, x: jax.Array, table: tuple[Any, Any], at: Any) -> jax.Array:
    """Return x·cos + partner(x)·sin for queries or keys at some places."""
    cos, sin = (ref[:, at] for ref in table)
    x = x.astype(jnp.float32)
    return x * cos + _partner(call, x) * sin


def _rotate_back(call: FlexCall, dy: jax.Array, table: tuple[Any, Any], at: Any) -> jax.Array:
    """Return the gradient of x from that of the rotated x."""
    cos, sin = (ref[:, at] for ref in table)
    return dy * cos + _partner(call, dy * sin)


def _partner(call: FlexCall, x: jax.Array) -> jax.Array:
    """Swap the two features of each pair of x [H, block]."""
    pairs, interleaved = call.turn
    if interleaved:
        is_first = lax.broadcasted_iota(jnp.int32, x.shape, 0) % 2 == 0
        return jnp.where(is_first, pltpu.roll(x, len(x) - 1, 0), pltpu.roll(x, 1, 0))
    parts = x[pairs : 2 * pairs], x[:pairs], x[2 * pairs :]
    return jnp.concatenate([y for y in parts if len(y)])
