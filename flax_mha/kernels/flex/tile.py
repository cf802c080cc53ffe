"""The static part of a call, and a tile of its scores, for any machine."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core

from flax_mha.base.coordinates import Array, At
from flax_mha.base.shapes import Dims
from flax_mha.kernels.call.spec import AttentionSpec, Platform
from flax_mha.kernels.flex.operand import Operand
from flax_mha.kernels.xla.tile_plan import Plan

LOG2E, LN2 = math.log2(math.e), math.log(2)


class Machine(NamedTuple):
    """The functions of a kind of device.

    Attributes:
      check: returns why no call of these q, k and v can run on a platform, or None.
      blocks: returns the possible largest tiles (queries, keys) of a device kind, with the relative
        cost of a score; the first is for traced masks.
      table: the most entries of a table of tiles.
      whole_tiles: True if functions see whole tiles, of both orders of axes; False if they must be
        elementwise.
      visits: returns the lists of visited tiles from all states and the dtype of q, or None.
      lanes: True if the kernels take tokens in the last axis of q, k and v, and features before it.
      turns: returns True if the kernels can rotate queries and keys of a dtype.
      missing: returns the operation that a function needs and the compiler lacks, or None.
      run: returns a function's result in a kernel, for closed-over arrays and arguments.
      forward: returns out, if `exact` with the bits that its dtype loses (see `split`), and each
        query's maximum, in base 2, and sum of exponentials, [R, N, 2, T′].
      gradients: returns the gradients of q, k, v and leaves from `Arrays`, dout, and [R, N, 3, T′]:
        the maximum, in base 2, 1/sum, and δ of `softmax.gradient_inputs`.
    """

    check: Callable[[jax.Array, jax.Array, jax.Array, Platform], str | None]
    blocks: Callable[[Dims, str], Sequence[tuple[tuple[int, int], float]]]
    table: int
    whole_tiles: bool
    visits: Callable[["FlexCall", Array, Any], Any]
    lanes: bool
    turns: Callable[["FlexCall", Any], bool]
    missing: Callable[[core.Jaxpr, Sequence[Operand]], str | None]
    run: Callable[..., Any]
    forward: Callable[..., tuple[list[jax.Array], jax.Array]]
    gradients: Callable[..., tuple[Any, Any, Any, list[Any]]]


# A spec without its arrays: its tree, and the leaves that are Python's numbers, each with its type
# because 1 equals 1.0, or None for arrays.
SpecForm: TypeAlias = tuple[Any, tuple[tuple[type, float] | None, ...]]


def fill(form: SpecForm, arrays: Sequence[Any]) -> AttentionSpec:
    """Return the spec of a form with these arrays."""
    tree, constants = form
    remaining = iter(arrays)
    leaves = [next(remaining) if x is None else x[1] for x in constants]
    return jax.tree.unflatten(tree, leaves)


class FlexCall(NamedTuple):
    """The static part of a call.

    Attributes:
      machine: the kind of device that runs it.
      plan: the division into tiles.
      device: JAX's name of the device kind.
      states: True if there can be full tiles, and partial ones.
      plain: a tile's scores in base 2, times log2(e), so that exponentials need no product: a
        function of closed-over arrays, the spec's leaves, `At`, and q·kᵀ.
      masked: the same under the mask. If T or S is no multiple of the blocks, a last argument says
        which scores exist.
      closed: the arrays that `plain` closes over, then those of `masked`.
      leaves: the spec's arrays. Dropout has two seeds of one number each.
      form: the spec without its arrays.
      pure: False if it holds user-defined functions. See `trees.trace_once`.
      precision: the precision of float32 matmuls.
      reads_sums: False if only the output is read, and the sums can be 0.
      keys_first: True if tiles are of keys × queries.
      turn: the pairs that a rotation in the kernel turns, and whether they are interleaved.
      swapped: the call with keys first, or None.
    """

    machine: Machine
    plan: Plan
    device: str
    states: tuple[bool, bool]
    plain: core.Jaxpr
    masked: core.Jaxpr
    closed: tuple[Operand, ...]
    leaves: tuple[Operand, ...]
    form: SpecForm
    pure: bool
    precision: Any
    reads_sums: bool
    keys_first: bool
    turn: tuple[int, bool]
    swapped: Any = None

    @property
    def slope(self) -> float | None:
        """The derivative of the scores by q·kᵀ if it is a constant, or None."""
        spec = fill(self.form, self.leaves)
        scale = spec.scale
        return scale if isinstance(scale, float | int) and not spec.scores else None

    def gain(self, x: jax.Array) -> jax.Array:
        """Scale a product of kept weights, as `AttentionSpec.scale_kept`."""
        return fill(self.form, self.leaves).scale_kept(x)


class Tile(NamedTuple):
    """The arrays of a tile. See `FlexCall` for their meaning."""

    call: FlexCall
    masked: bool
    closed: list[Any]
    leaves: list[Any]
    at: At
    inside: Array
    keep: jax.Array | None

    @classmethod
    def of(cls, call: FlexCall, masked: bool, values: Sequence[Any], at: At) -> "Tile":
        """Return a tile from the arrays of `closed` and `leaves`, and the indices of its scores."""
        closed, leaves = list(values[: len(call.closed)]), list(values[len(call.closed) :])
        dims, spec = call.plan.dims, fill(call.form, leaves)
        inside = (at.q < dims.T) & (at.k < dims.S)
        # Clamp indices to the last query and key, so that user functions see no padding index.
        if call.plan.ragged:
            q, k = jnp.minimum(at.q, dims.T - 1), jnp.minimum(at.k, dims.S - 1)
            at = at._replace(q=q, k=k)
        at = spec.override(at)
        keep = None if spec.dropout is None else spec.dropout.keep(*at)
        return cls(call, masked, closed, leaves, at, inside, keep)

    def score(self, s: jax.Array, leaves: Sequence[Any]) -> jax.Array:
        """Return the scores in base 2 from q·kᵀ, −∞ where masked and beyond the last tokens."""
        function, args = self.function(s, leaves)
        return self.call.machine.run(function, *args)

    def function(self, s: jax.Array, leaves: Sequence[Any]) -> tuple[core.Jaxpr, list[Any]]:
        """Return the function of the scores, and its arguments."""
        call, args = self.call, [*leaves, *self.at, s]
        split = len(call.plain.constvars)
        if not self.masked:
            return call.plain, [*self.closed[:split], *args]
        inside = [self.inside] if call.plan.ragged else []
        return call.masked, [*self.closed[split:], *args, *inside]

    def drop(self, x: jax.Array) -> jax.Array:
        """Set dropped weights to 0, without scaling the kept ones."""
        return x if self.keep is None else jnp.where(self.keep, x, jnp.zeros_like(x))
