"""Rotated queries and keys in fast memory.

A block of queries is rotated where its first tile begins, and a block of keys where a sum first
meets it. The tables of cosines and sines stay in fast memory for all heads.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flax_mha.kernels.chips import tpus
from flax_mha.kernels.flex.passes import Arrays, Tables
from flax_mha.kernels.flex.tile import FlexCall
from flax_mha.kernels.flex.tpu.tile_order import Step, TileOrder
from flax_mha.kernels.xla.tile_plan import Plan


def fits(call: FlexCall, dtype: Any) -> bool:
    """Return True if the tables and all keys of a head fit in a third of the fast memory."""
    (T, S), H = call.plan.padded, max(128, call.plan.dims.H)
    # Tables are stored twice, as all blocks that a kernel loads.
    held = 2 * 2 * 4 * (T + S) * H + S * H * jnp.dtype(dtype).itemsize
    return held <= tpus.memory(call.device) // 3


def tables(x: Arrays, order: TileOrder) -> list[tuple[jax.Array, Any]]:
    """Return the tables of a rotation as inputs of a kernel, if it rotates."""
    if x.tables is None:
        return []
    *of_tokens, swap = jax.tree.leaves(x.tables)
    blocks = [
        (y, order.block(y.shape[2:], ("r" if len(y) > 1 else ".") + "...")) for y in of_tokens
    ]
    return [*blocks, (swap, order.block(swap.shape, ".."))]


def memory(plan: Plan, x: Arrays) -> list[Any]:
    """Describe the fast memory for a block of queries, and for all keys of a head."""
    lengths = plan.block_q, plan.padded[1]
    shapes = [
        jax.ShapeDtypeStruct((n, y.shape[-1]), y.dtype)
        for n, y in zip(lengths, (x.q, x.k), strict=True)
    ]
    return [*shapes, pltpu.SMEM((plan.nk,), jnp.int32)]


class Loaded(NamedTuple):
    """The memory of a running kernel, given references to the inputs `tables`, and to `memory`."""

    plan: Plan
    tables: Tables
    q: Any
    k: Any
    met: Any

    @classmethod
    def of(cls, plan: Plan, tables: Sequence[Any], memory: Sequence[Any]) -> "Loaded":
        """Return the memory."""
        cos_q, sin_q, cos_k, sin_k, swap = tables
        return cls(plan, Tables((cos_q, sin_q), (cos_k, sin_k), swap), *memory)

    def load(self, step: Step, q: Any, k: Any) -> None:
        """Rotate the queries of a new block, and the keys that a sum has not met."""

        @pl.when(step.first)
        def forget() -> None:
            for j in range(self.met.shape[0]):
                self.met[j] = 0

        @pl.when(step.begin)
        def load_queries() -> None:
            self.q[...] = self._turn(q[...], *self._queries_of(step))

        @pl.when(self.met[step.near] == 0)
        def load_keys() -> None:
            self.met[step.near] = 1
            at = self._places(step.near)
            self.k[at, :] = self._turn(k[...], "k", at)

    def read(self, step: Step) -> tuple[jax.Array, jax.Array]:
        """Return the queries and keys of a step."""
        return self.q[...], self.k[self._places(step.near), :]

    def turn_back_queries(self, step: Step, dq: jax.Array) -> jax.Array:
        """Return the gradient of a block of queries before their rotation."""
        return self._turn_back(dq, *self._queries_of(step))

    def turn_back_keys(self, dk: Any, gradients: Any) -> None:
        """Write the gradients of all keys before their rotation, from those after it."""

        def write(j: jax.Array, _: None) -> None:
            at = self._places(j)
            dk[at, :] = self._turn_back(gradients[at, :], "k", at).astype(dk.dtype)

        lax.fori_loop(0, self.plan.nk, write, None)

    def _queries_of(self, step: Step) -> tuple[str, Any]:
        """Return the side of queries, and the places of a step's."""
        block = self.plan.block_q
        return "q", pl.ds(pl.multiple_of(step.i * block, block), block)

    def _places(self, j: Any) -> Any:
        """Return the places of a block of keys."""
        return pl.ds(pl.multiple_of(j * self.plan.block_k, self.plan.block_k), self.plan.block_k)

    def _turn(self, x: jax.Array, side: str, at: Any) -> jax.Array:
        """Return x·cos + partner(x)·sin for queries `q` or keys `k` at some places."""
        cos, sin = (ref[at, :] for ref in getattr(self.tables, side))
        return (x.astype(jnp.float32) * cos + self._partner(x) * sin).astype(x.dtype)

    def _turn_back(self, dy: jax.Array, side: str, at: Any) -> jax.Array:
        """Return the gradient of x, float32, from that of the rotated x."""
        cos, sin = (ref[at, :] for ref in getattr(self.tables, side))
        product, half = dy * sin, self.tables.swap.dtype
        # Two parts in bfloat16 have 16 bits of the gradient, which is then rounded to 8.
        part = product.astype(half)
        rest = (product - part.astype(jnp.float32)).astype(half)
        other = self._partner(rest) if half == jnp.bfloat16 else 0.0
        return dy * cos + self._partner(part) + other

    def _partner(self, x: jax.Array) -> jax.Array:
        is_wide = x.dtype == jnp.float32
        precision = lax.Precision.HIGHEST if is_wide else lax.Precision.DEFAULT
        return lax.dot(
            x, self.tables.swap[...], precision=precision, preferred_element_type=jnp.float32
        )
