"""A tile of scores in the kernels of flex: loading its arrays, its scores and gradients."""

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
    """The static part of a call.

    Attributes:
      plan: the division into tiles.
      visits: the maximum number of visited tiles of a block of queries, and of a block of keys.
      states: True if there may be full tiles, and partial ones.
      plain: a tile's scores, a function of the arrays it closes over, the spec's leaves, the
        coordinates of `At`, and q·kᵀ.
      masked: the same function under the mask. If T or S is not a multiple of the blocks, its last
        argument tells which scores exist.
      num_plain: the number of arrays that `plain` closes over.
      closed: the arrays that both functions close over.
      leaves: the spec's leaves. Dropout has two seeds of one number each.
      tree: the spec's tree structure.
      guarded: True if factors of gradients must be finite.
      precision: the precision of float32 matmuls.
    """

    plan: Plan
    visits: tuple[int, int]
    states: tuple[bool, bool]
    plain: Function
    masked: Function
    num_plain: int
    closed: tuple[Operand, ...]
    leaves: tuple[Operand, ...]
    tree: Any
    guarded: bool
    precision: Any

    def spec(self, leaves: Sequence[Any]) -> AttentionSpec:
        """Return the spec with these leaves."""
        return jax.tree.unflatten(self.tree, leaves)

    def gain(self, x: jax.Array) -> jax.Array:
        """Scale a product of kept weights, as `AttentionSpec.scale_kept`."""
        return self.spec(self.leaves).scale_kept(x)

    def dot(self, a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
        """Return the matmul of a and b over one axis of each, in float32."""
        return lax.dot_general(
            a, b, (((axis_a,), (axis_b,)), ((), ())),
            precision=self.precision if a.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )  # fmt: skip


class GridStep(NamedTuple):
    """A step of a kernel's grid.

    Attributes:
      call: the static part of the call.
      tile: the step's tile.
      first: True where a sum begins.
      last: True where a sum ends.
      row: the row's index in the whole batch, not in the device's part.
      head: the query head's index in the whole call.
      refs: references to the closed-over arrays and the spec's leaves.
    """

    call: FlexCall
    tile: FlexTile
    first: jax.Array
    last: jax.Array
    row: jax.Array
    head: jax.Array
    refs: Sequence[Any]

    def visit(self, fn: Callable[["Tile"], None]) -> None:
        """Run fn on the tile, if it is not empty."""
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
        # Clamp indices to the last query and key, so that user functions see no padding index.
        q, k = jnp.minimum(q, plan.dims.T - 1), jnp.minimum(k, plan.dims.S - 1)
        spec = call.spec(leaves)
        q = q if spec.q_pos is None else spec.q_pos.array
        k = k if spec.k_pos is None else spec.k_pos.array
        row, head = (jnp.full((1, 1), x, jnp.int32) for x in (self.row, self.head))
        at = At(row, head, q, k)
        keep = None if spec.dropout is None else spec.dropout.keep(*at)
        return Tile(call, masked, closed, leaves, at, inside, keep)


class Tile(NamedTuple):
    """The arrays of a tile. See `FlexCall` for their meaning."""

    call: FlexCall
    masked: bool
    closed: list[Any]
    leaves: list[Any]
    at: At
    inside: jax.Array
    keep: jax.Array | None

    def score(self, s: jax.Array, leaves: Sequence[Any]) -> jax.Array:
        """Return the scores from q·kᵀ: −∞ where masked, and beyond the last query and key."""
        call, args = self.call, (*leaves, *self.at, s)
        if not self.masked:
            return call.plain(*self.closed[: call.num_plain], *args)
        inside = (self.inside,) if call.plan.ragged else ()
        return call.masked(*self.closed[call.num_plain :], *args, *inside)

    def drop(self, x: jax.Array) -> jax.Array:
        """Set dropped weights to 0, without scaling the kept ones."""
        return x if self.keep is None else jnp.where(self.keep, x, jnp.zeros_like(x))

    def gradient(
        self, operands: Sequence[Any], learned: Sequence[int] = ()
    ) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        """Return the kept weights, and the gradients of q·kᵀ and of learned leaves."""
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
