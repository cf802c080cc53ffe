"""A tile of scores in the kernels of flex: from the blocks of a call's arrays to its gradients."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flax_mha.base.coordinates import At
from flax_mha.kernels import softmax
from flax_mha.kernels.flex.mosaic import Function
from flax_mha.kernels.flex.tile_order import FlexTile, Operand
from flax_mha.kernels.spec import AttentionSpec
from flax_mha.kernels.tile_plan import Plan
from flax_mha.masks import FULL, PARTIAL


class FlexCall(NamedTuple):
    """A call as far as it is known before tracing.

    Attributes:
      plan: its division.
      visits: see `TileOrder.of`.
      states: True if there may be full tiles, and partial ones.
      plain: the scores of a tile, from what it closes over, the spec's leaves, the coordinates of
        `At` and q·kᵀ.
      masked: the same under the mask. If T or S is no multiple of the blocks, its last argument
        tells which scores exist.
      of_plain: how many of the arrays that are closed over are those of `plain`.
      closed: what the functions close over.
      leaves: those of the spec, whose dropout has two seeds of one number each.
      tree: its structure.
      guarded: True if gradients must not meet values that are not finite.
      precision: of the products of float32.
    """

    plan: Plan
    visits: tuple[int, int]
    states: tuple[bool, bool]
    plain: Function
    masked: Function
    of_plain: int
    closed: tuple[Operand, ...]
    leaves: tuple[Operand, ...]
    tree: Any
    guarded: bool
    precision: Any

    def spec(self, leaves: Sequence[Any]) -> AttentionSpec:
        """Return the spec with these leaves."""
        return jax.tree.unflatten(self.tree, leaves)

    def gain(self, x: jax.Array) -> jax.Array:
        """See `AttentionSpec.scale_kept`."""
        return self.spec(self.leaves).scale_kept(x)

    def dot(self, a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
        """Multiply in float32, over these axes."""
        return lax.dot_general(
            a, b, (((axis_a,), (axis_b,)), ((), ())),
            precision=self.precision if a.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )  # fmt: skip


class GridStep(NamedTuple):
    """A step of a kernel's grid.

    Attributes:
      call: what is known.
      tile: the place of its tile.
      first: True where a sum begins.
      last: True where it ends.
      row: index of the row in the whole batch, which a device may hold a part of.
      head: index of the query head in the whole call.
      refs: the arrays that the functions close over, and the leaves of the spec.
    """

    call: FlexCall
    tile: FlexTile
    first: jax.Array
    last: jax.Array
    row: jax.Array
    head: jax.Array
    refs: Sequence[Any]

    def visit(self, fn: Callable[["Tile"], None]) -> None:
        """Run fn if the tile is not empty."""
        for state, may_be in zip((FULL, PARTIAL), self.call.states, strict=True):
            if may_be:

                @pl.when(self.tile.state == state)
                def _(masked: bool = state == PARTIAL) -> None:
                    fn(self._tile(masked))

    def _tile(self, masked: bool) -> "Tile":
        plan, call = self.call.plan, self.call
        refs = zip((*call.closed, *call.leaves), self.refs, strict=True)
        values = [operand.read(ref) for operand, ref in refs]
        closed, leaves = values[: len(call.closed)], values[len(call.closed) :]
        sizes = (plan.block_q, 1), (1, plan.block_k)
        q, k = (
            lax.broadcasted_iota(jnp.int32, size, axis) + block * max(size)
            for axis, (size, block) in enumerate(
                zip(sizes, (self.tile.i, self.tile.j), strict=True)
            )
        )
        inside = (q < plan.dims.T) & (k < plan.dims.S)
        # Beyond the last ones stands what stands there, so that functions see nothing new.
        q, k = jnp.minimum(q, plan.dims.T - 1), jnp.minimum(k, plan.dims.S - 1)
        spec = call.spec(leaves)
        q = q if spec.q_pos is None else spec.q_pos.array
        k = k if spec.k_pos is None else spec.k_pos.array
        row, head = (jnp.full((1, 1), x, jnp.int32) for x in (self.row, self.head))
        at = At(row, head, q, k)
        keep = None if spec.dropout is None else spec.dropout.keep(*at)
        return Tile(call, masked, closed, leaves, at, inside, keep)


class Tile(NamedTuple):
    """The arrays of a tile, see `FlexCall`."""

    call: FlexCall
    masked: bool
    closed: list[Any]
    leaves: list[Any]
    at: At
    inside: jax.Array
    keep: jax.Array | None

    def score(self, s: jax.Array, leaves: Sequence[Any]) -> jax.Array:
        """Return the scores, given q·kᵀ: −∞ where masked, and beyond the last query and key."""
        call, args = self.call, (*leaves, *self.at, s)
        if not self.masked:
            return call.plain(*self.closed[: call.of_plain], *args)
        inside = (self.inside,) if call.plan.ragged else ()
        return call.masked(*self.closed[call.of_plain :], *args, *inside)

    def drop(self, x: jax.Array) -> jax.Array:
        """Drop weights, without the gain of those that are kept."""
        return x if self.keep is None else jnp.where(self.keep, x, jnp.zeros_like(x))

    def gradient(
        self, operands: Sequence[Any], learned: Sequence[int] = ()
    ) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        """Return the weights that are kept, and the gradients of q·kᵀ and of learned leaves."""
        q, k, v, dout, stats = operands
        top, share, delta = (stats[n : n + 1, :].T for n in range(3))

        def score(s: jax.Array, arrays: list[jax.Array]) -> jax.Array:
            leaves = list(self.leaves)
            for n, x in zip(learned, arrays, strict=True):
                leaves[n] = x
            return self.score(s, leaves)

        dot = self.call.dot(q[...], k[...], 1, 1)
        s, pull = jax.vjp(score, dot, [self.leaves[n] for n in learned])
        p = softmax.weights(s, top, share, guarded=True)
        dp = self.call.gain(self.drop(self.call.dot(dout[...], v[...], 1, 1)))
        return self.drop(p), *pull(softmax.gradient(p, dp, delta))
