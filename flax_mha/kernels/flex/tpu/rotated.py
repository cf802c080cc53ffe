"""Rotated queries and keys in fast memory.

A block of queries is rotated where its first tile begins, and a block of keys where a sum first
meets it. The tables of cosines and sines stay in fast memory for all heads.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flax_mha.kernels.chips import tpus
from flax_mha.kernels.flex.passes import Arrays, Tables
from flax_mha.kernels.flex.tile import FlexCall
from flax_mha.kernels.flex.tpu.tile_order import Step, block_at
from flax_mha.kernels.xla.tile_plan import Plan


def fits(call: FlexCall, dtype: Any) -> bool:
    """Return True if the tables and all keys of a head fit in a third of the fast memory."""
    (T, S), H = call.plan.padded, max(128, call.plan.dims.H)
    # Tables are stored twice, as all blocks that a kernel loads.
    held = 2 * 2 * 4 * (T + S) * H + S * H * jnp.dtype(dtype).itemsize
    return held <= tpus.memory(call.device) // 3


def memory(plan: Plan, x: Arrays) -> list[Any]:
    """Describe the fast memory for a block of queries and for all keys of a head, if it rotates."""
    if x.tables is None:
        return []
    shapes = ((plan.block_q, x.q), (plan.padded[1], x.k))
    described = [jax.ShapeDtypeStruct((n, y.shape[-1]), y.dtype) for n, y in shapes]
    return [*described, pltpu.SMEM((plan.nk,), jnp.int32)]


class Rotated(NamedTuple):
    """The rotated queries and keys of a running kernel.

    Attributes:
      plan: the division into tiles.
      tables: references to the tables.
      queries: fast memory for a block of rotated queries.
      keys: fast memory for all rotated keys.
      met: 1 for each block of keys that is rotated, in scalar memory.
    """

    plan: Plan
    tables: Tables
    queries: Any
    keys: Any
    met: Any

    def load(self, step: Step, q: Any, k: Any) -> None:
        """Rotate the queries of a new block, and the keys that a sum has not met."""

        @pl.when(step.first)
        def forget() -> None:
            for j in range(self.plan.nk):
                self.met[j] = 0

        @pl.when(step.begin)
        def rotate_queries() -> None:
            self.queries[...] = self._rotate(
                q[...], self.tables.q, block_at(step.i, self.plan.block_q)
            )

        @pl.when(self.met[step.j] == 0)
        def rotate_keys() -> None:
            self.met[step.j] = 1
            at = block_at(step.j, self.plan.block_k)
            self.keys[at, :] = self._rotate(k[...], self.tables.k, at)

    def read(self, step: Step) -> tuple[jax.Array, jax.Array]:
        """Return the queries and keys of a step."""
        return self.queries[...], self.keys[block_at(step.j, self.plan.block_k), :]

    def gradient_of_queries(self, step: Step, dq: jax.Array) -> jax.Array:
        """Return the gradient of a block of queries before their rotation."""
        return self._rotate_back(dq, self.tables.q, block_at(step.i, self.plan.block_q))

    def write_gradient_of_keys(self, dk: Any, gradients: Any) -> None:
        """Write the gradients of all keys before their rotation, from those after it."""

        def write(j: jax.Array, _: None) -> None:
            at = block_at(j, self.plan.block_k)
            dk[at, :] = self._rotate_back(gradients[at, :], self.tables.k, at).astype(dk.dtype)

        lax.fori_loop(0, self.plan.nk, write, None)

    def _rotate(self, x: jax.Array, table: tuple[Any, Any], at: Any) -> jax.Array:
        """Return x·cos + partner(x)·sin for queries or keys at some places."""
        cos, sin = (ref[at, :] for ref in table)
        return (x.astype(jnp.float32) * cos + self._partner(x) * sin).astype(x.dtype)

    def _rotate_back(self, dy: jax.Array, table: tuple[Any, Any], at: Any) -> jax.Array:
        """Return the gradient of x, float32, from that of the rotated x."""
        cos, sin = (ref[at, :] for ref in table)
        product, half = dy * sin, self.tables.swap.dtype
        # Two parts in bfloat16 have 16 bits of the gradient, which is then rounded to 8.
        part = product.astype(half)
        rest = (product - part.astype(jnp.float32)).astype(half)
        other = self._partner(rest) if half == jnp.bfloat16 else 0.0
        return dy * cos + self._partner(part) + other

    def _partner(self, x: jax.Array) -> jax.Array:
        is_wide = x.dtype == jnp.float32
        return lax.dot(
            x, self.tables.swap[...], preferred_element_type=jnp.float32,
            precision=lax.Precision.HIGHEST if is_wide else lax.Precision.DEFAULT,
        )  # fmt: skip
