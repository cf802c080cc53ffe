"""Packed documents in cuDNN's ragged layout: rows that are cut into runs of tokens.

cuDNN takes each run for a sequence of its own, which begins at an offset of the row and has a
length. Every row is given as many runs as any may have: those that it lacks begin at its end, and
have no tokens. A run has its own line of the lse, counted from its first token: so the lse that
cuDNN reads and writes is [rows, runs, N, T], of which our [rows, N, T] is gathered.

What cuDNN does not write, tokens that are of no run, holds anything.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct


class Runs(struct.PyTreeNode):
    """The runs of rows of T tokens, for queries and keys alike.

    Attributes:
      index: int32 [rows|1, T], which run each token is of, 0, 1, …; tokens from `most` on are of
        none.
      most: how many a row has at most, 2 at least: JAX takes one for no ragged layout.
    """

    index: Any
    most: int = struct.field(pytree_node=False)

    def starts(self) -> jax.Array:
        """Where each run begins, and the last one ends, int32 [rows|1, most + 1]."""
        numbers = jnp.arange(self.most + 1, dtype=jnp.int32)
        before = self.index[:, None] < numbers[None, :, None]
        return before.sum(-1, dtype=jnp.int32)

    def bounds(self) -> tuple[jax.Array, jax.Array]:
        """Where each token's run begins, and ends, int32 [rows|1, T]; alike where it has none."""
        starts = self.starts()
        begin, end = (
            jnp.take_along_axis(starts, jnp.minimum(self.index + i, self.most), 1) for i in (0, 1)
        )
        return begin, end

    def lengths(self, limit: jax.Array) -> jax.Array:
        """How many tokens of each run stand before limit [rows], and one at least, [rows, most].

        Where there are none, and the run has some, the rows are settled by us.
        """
        starts = self.starts()
        sizes = starts[:, 1:] - starts[:, :-1]
        least = jnp.minimum(sizes, 1)
        return jnp.clip(limit[:, None] - starts[:, :-1], least, sizes)

    def offsets(self) -> jax.Array:
        """As JAX takes them, int32 [rows, most + 1]: where each run begins, then −1 for nothing."""
        return self.starts().at[:, -1].set(-1)

    def lse(self, by_run: jax.Array) -> jax.Array:
        """[rows, N, T] of cuDNN's [rows, most, N, T]."""
        begin, _ = self.bounds()
        local = jnp.arange(self.index.shape[1], dtype=jnp.int32)[None] - begin

        def row(by_run: jax.Array, index: jax.Array, local: jax.Array) -> jax.Array:
            return by_run[index, :, local].T

        return jax.vmap(row)(by_run, jnp.minimum(self.index, self.most - 1), local)

    def by_run(self, lse: jax.Array) -> jax.Array:
        """[rows, most, N, T] of [rows, N, T]; behind a run's end stands anything."""
        T = lse.shape[-1]
        of_row = self.starts()[:, :-1, None] + jnp.arange(T, dtype=jnp.int32)[None, None]
        of_row = jnp.minimum(of_row, T - 1)
        return jnp.take_along_axis(lse[:, None], of_row[:, :, None], -1)
