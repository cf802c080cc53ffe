"""A tile of scores in the kernels of flex: from the blocks of a call's arrays to its gradients."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flax_mha.grid import At
from flax_mha.kernels import softmax
from flax_mha.kernels.dropout import WeightDropout
from flax_mha.kernels.flex.lowered import Function
from flax_mha.kernels.flex.walk import Leaf, Step
from flax_mha.kernels.plan import Plan
from flax_mha.masks import FULL, PARTIAL


class FlexCall(NamedTuple):
    """What of a call is known before tracing.

    Attributes:
      plan: its division.
      visits: see `Walk.of`.
      kinds: whether there may be tiles that need no mask, and tiles that do.
      plain: the scores of a tile, from what it closes over, the own leaves, the coordinates of `At`
        and q·kᵀ.
      masked: likewise under the mask; where T or S is no multiple of the blocks its last argument
        is which scores are.
      consts: how many arrays each closes over.
      own: how many leaves masks and scores have.
      leaves: arrays by tile: what the functions close over, the own ones; then, as far as there are
        any, positions of queries and keys, and the two halves of the seed.
      learned: which of them take gradients.
      positioned: whether there are positions of queries, and of keys.
      dropout: its rate, and whether it is one pattern for all rows and heads.
      guarded: whether gradients must not meet what is not finite.
      precision: of the products of float32.
    """

    plan: Plan
    visits: tuple[int, int]
    kinds: tuple[bool, bool]
    plain: Function
    masked: Function
    consts: tuple[int, int]
    own: int
    leaves: tuple[Leaf, ...]
    learned: tuple[bool, ...]
    positioned: tuple[bool, bool]
    dropout: tuple[float, bool] | None
    guarded: bool
    precision: Any

    @property
    def ragged(self) -> bool:
        """Whether the last blocks reach beyond the last query or key."""
        plan = self.plan
        return bool(plan.dims.T % plan.block_q or plan.dims.S % plan.block_k)

    @property
    def gain(self) -> float:
        """What kept weights are multiplied by; after their products, to round them once less."""
        return 1.0 if self.dropout is None else 1 / (1 - self.dropout[0])

    def merge(self, learned: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
        """All leaves."""
        learned, rest = list(learned), list(rest)
        return [learned.pop(0) if x else rest.pop(0) for x in self.learned]

    def dot(self, a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
        """A product in float32, over those axes."""
        return lax.dot_general(
            a, b, (((axis_a,), (axis_b,)), ((), ())),
            precision=self.precision if a.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )  # fmt: skip


class Here(NamedTuple):
    """A step of a kernel.

    Attributes:
      call: what is known.
      step: where it is.
      first: whether a sum begins.
      last: whether it ends.
      row: index of the row in the whole batch, which a device may hold a part of.
      head: likewise.
      refs: the leaves.
    """

    call: FlexCall
    step: Step
    first: jax.Array
    last: jax.Array
    row: jax.Array
    head: jax.Array
    refs: Sequence[Any]

    def visit(self, fn: Callable[["Tile"], None]) -> None:
        """Runs fn if the tile is not empty."""
        for masked, kind, there in zip(
            (False, True), (FULL, PARTIAL), self.call.kinds, strict=True
        ):
            if there:

                @pl.when(self.step.kind == kind)
                def _(masked: bool = masked) -> None:
                    fn(self._tile(masked))

    def _tile(self, masked: bool) -> "Tile":
        plan, call = self.call.plan, self.call
        values = [leaf.read(ref) for leaf, ref in zip(call.leaves, self.refs, strict=True)]
        sizes = (plan.block_q, 1), (1, plan.block_k)
        q, k = (
            lax.broadcasted_iota(jnp.int32, size, axis) + block * max(size)
            for axis, (size, block) in enumerate(
                zip(sizes, (self.step.i, self.step.j), strict=True)
            )
        )
        inside = (q < plan.dims.T) & (k < plan.dims.S)
        # Beyond the last ones stands what stands there, so that functions see nothing new.
        q, k = jnp.minimum(q, plan.dims.T - 1), jnp.minimum(k, plan.dims.S - 1)
        extra = values[sum(call.consts) + call.own :]
        q = extra.pop(0) if call.positioned[0] else q
        k = extra.pop(0) if call.positioned[1] else k
        row, head = (jnp.full((1, 1), x, jnp.int32) for x in (self.row, self.head))
        at, keep = At(row, head, q, k), None
        if call.dropout is not None:
            seed: Any = tuple(x.astype(jnp.uint32) for x in extra)
            keep = WeightDropout(seed, *call.dropout).keep(*at)
        return Tile(call, masked, values, at, inside, keep)


class Tile(NamedTuple):
    """The arrays of a tile, see `FlexCall`."""

    call: FlexCall
    masked: bool
    values: list[Any]
    at: At
    inside: jax.Array
    keep: jax.Array | None

    def score(self, s: jax.Array, values: Sequence[Any]) -> jax.Array:
        """The scores from q·kᵀ: −∞ where masked, and beyond the last query and key."""
        call = self.call
        first, both = call.consts[0], sum(call.consts)
        own = values[both : both + call.own]
        if not self.masked:
            return call.plain(*values[:first], *own, *self.at, s)
        inside = (self.inside,) if call.ragged else ()
        return call.masked(*values[first:both], *own, *self.at, s, *inside)

    def drop(self, x: jax.Array) -> jax.Array:
        """What is kept of weights, without their gain."""
        return x if self.keep is None else jnp.where(self.keep, x, jnp.zeros_like(x))

    def gradient(
        self, operands: Sequence[Any], wanted: Sequence[int] = ()
    ) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        """The weights that are kept, and the gradients of q·kᵀ and of the wanted leaves."""
        q, k, v, dout, stats = operands
        top, share, delta = (stats[n : n + 1, :].T for n in range(3))

        def score(s: jax.Array, leaves: list[jax.Array]) -> jax.Array:
            values = list(self.values)
            for n, x in zip(wanted, leaves, strict=True):
                values[n] = x
            return self.score(s, values)

        dot = self.call.dot(q[...], k[...], 1, 1)
        s, pull = jax.vjp(score, dot, [self.values[n] for n in wanted])
        p = softmax.weights(s, top, share, guarded=True)
        dp = self.drop(self.call.dot(dout[...], v[...], 1, 1)) * self.call.gain
        return self.drop(p), *pull(softmax.gradient(p, dp, delta))
