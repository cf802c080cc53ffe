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
    pairs, interleaved = call.turn
    held = 2 * 2 * 4 * sum(call.plan.padded) * (call.plan.dims.H if interleaved else pairs)
    return held <= tpus.memory(call.device) // 3


def queries(call: FlexCall, tables: Tables | None, step: Step, q: Any, sign: int = 1) -> jax.Array:
    """Return the queries [H, block] of a step, or their gradients rotated back by a sign of −1."""
    at = block_at(step.i, call.plan.block_q)
    return _rotate(call, q[...], tables and tables.q, at, sign).astype(q.dtype)


def keys(call: FlexCall, tables: Tables | None, step: Step, k: Any) -> jax.Array:
    """Return the keys [H, block] of a step."""
    at = block_at(step.j, call.plan.block_k)
    return _rotate(call, k[...], tables and tables.k, at).astype(k.dtype)


def write_gradient_of_keys(
    call: FlexCall, tables: Tables | None, dk: Any, gradients: Any, factor: float
) -> None:
    """Write the gradients of all keys before their rotation, from those after it and a factor."""

    def write(j: jax.Array, _: None) -> None:
        at = block_at(j, call.plan.block_k)
        found = _rotate(call, gradients[:, at], tables and tables.k, at, -1) * factor
        dk[:, at] = found.astype(dk.dtype)

    lax.fori_loop(0, dk.shape[1] // call.plan.block_k, write, None)


def _rotate(
    call: FlexCall, x: jax.Array, table: tuple[Any, Any] | None, at: Any, sign: int = 1
) -> jax.Array:
    """Rotate queries or keys [H, block] at some places, or their gradients back by a sign of −1."""
    if table is None:
        return x
    (pairs, interleaved), cos, sin = call.turn, *(ref[:, at] for ref in table)
    x, sin = x.astype(jnp.float32), sin if sign > 0 else -sin
    if interleaved:
        is_first = lax.broadcasted_iota(jnp.int32, x.shape, 0) % 2 == 0
        partner = jnp.where(is_first, pltpu.roll(x, len(x) - 1, 0), pltpu.roll(x, 1, 0))
        return x * cos + partner * sin
    a, b = x[:pairs], x[pairs : 2 * pairs]
    # libtpu's schedule of a difference is longer.
    parts = a * cos + b * -sin, b * cos + a * sin, x[2 * pairs :]
    return jnp.concatenate([y for y in parts if len(y)])
