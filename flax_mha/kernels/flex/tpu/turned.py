"""Queries and keys that are rotated inside a kernel, and the gradients of both.

A head's queries are rotated where their first tile begins, and its keys where they are first met,
both into fast memory. The tables of cosines and sines stay there for all heads.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flax_mha.kernels.chips import tpus
from flax_mha.kernels.flex.passes import Tables
from flax_mha.kernels.flex.tile import FlexCall
from flax_mha.kernels.flex.tpu.tile_order import Step, TileOrder
from flax_mha.kernels.xla.tile_plan import Plan

Inputs = list[tuple[jax.Array, Any]]


def fits(call: FlexCall, dtype: Any) -> bool:
    """Return True if the tables and all keys of a head fit in a third of the fast memory."""
    (T, S), H = call.plan.padded, max(128, call.plan.dims.H)
    # Tables are stored twice, as all blocks that a kernel loads.
    held = 2 * 2 * 4 * (T + S) * H + S * H * jnp.dtype(dtype).itemsize
    return held <= tpus.memory(call.device) // 3


def inputs(tables: Tables | None, order: TileOrder) -> Inputs:
    """Return the inputs of a kernel that rotates, if it does."""
    if tables is None:
        return []
    of_tokens = [
        (x, order.block(x.shape[2:], ("r" if len(x) > 1 else ".") + "...")) for x in tables[:4]
    ]
    return [*of_tokens, (tables.swap, order.block(tables.swap.shape, ".."))]


def scratch(tables: Tables | None, plan: Plan, dtype: Any) -> list[Any]:
    """Return the memory of a kernel that rotates: queries, keys, and the blocks of keys met."""
    if tables is None:
        return []
    H = plan.dims.H
    return [
        jax.ShapeDtypeStruct((plan.block_q, H), dtype),
        jax.ShapeDtypeStruct((plan.padded[1], H), dtype),
        pltpu.SMEM((plan.nk,), jnp.int32),
    ]


class TurnedBlocks(NamedTuple):
    """The rotation of a running kernel: its inputs, and its memory."""

    plan: Plan
    tables: Tables
    q: Any
    k: Any
    met: Any

    @classmethod
    def of(cls, plan: Plan, tables: list[Any], memory: list[Any]) -> "TurnedBlocks | None":
        """Return the rotation, given references to `inputs` and `scratch`, or None."""
        return cls(plan, Tables(*tables), *memory) if tables else None

    def load(self, step: Step, q: Any, k: Any, clean: Callable[[jax.Array], jax.Array]) -> None:
        """Rotate the queries and keys of a step that are new to a sum. See `TileOrder`."""

        @pl.when(step.first)
        def forget() -> None:
            for j in range(self.plan.nk):
                self.met[j] = 0

        @pl.when(step.begin)
        def load_queries() -> None:
            self.q[...] = clean(self._turn(q[...], self._of_queries(step)))

        @pl.when(self.met[step.j] == 0)
        def load_keys() -> None:
            self.met[step.j] = 1
            self.k[self.keys(step.j), :] = clean(self._turn(k[...], self._of_keys(step.j)))

    def keys(self, j: Any) -> Any:
        """Return the places of a block of keys."""
        return pl.ds(pl.multiple_of(j * self.plan.block_k, self.plan.block_k), self.plan.block_k)

    def turn_back_queries(self, step: Step, dq: jax.Array) -> jax.Array:
        """Return the gradient of a block of queries before rotation."""
        return self._turn_back(dq, self._of_queries(step))

    def turn_back_keys(self, dk: Any, gradients: Any) -> None:
        """Write the gradients of all keys before rotation."""

        def write(j: jax.Array, _: None) -> None:
            at = self.keys(j)
            dk[at, :] = self._turn_back(gradients[at, :], self._of_keys(j)).astype(dk.dtype)

        lax.fori_loop(0, self.plan.nk, write, None)

    def _of_queries(self, step: Step) -> tuple[jax.Array, jax.Array]:
        at = pl.ds(pl.multiple_of(step.i * self.plan.block_q, self.plan.block_q), self.plan.block_q)
        return self.tables.q_cos[at, :], self.tables.q_sin[at, :]

    def _of_keys(self, j: Any) -> tuple[jax.Array, jax.Array]:
        at = self.keys(j)
        return self.tables.k_cos[at, :], self.tables.k_sin[at, :]

    def _turn(self, x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Return x·cos + partner(x)·sin."""
        cos, sin = angles
        return (x.astype(jnp.float32) * cos + self._partner(x) * sin).astype(x.dtype)

    def _turn_back(self, dy: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Return the gradient of x, float32, from that of the rotated x."""
        cos, sin = angles
        product, half = dy * sin, self.tables.swap.dtype
        # Two parts in bfloat16 have 16 bits of the gradient, which is then rounded to 8.
        part = product.astype(half).astype(jnp.float32)
        rest = self._partner((product - part).astype(half)) if half == jnp.bfloat16 else 0.0
        return dy * cos + self._partner(part.astype(half)) + rest

    def _partner(self, x: jax.Array) -> jax.Array:
        precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        return lax.dot(
            x, self.tables.swap[...].astype(x.dtype), precision=precision,
            preferred_element_type=jnp.float32,
        )  # fmt: skip
