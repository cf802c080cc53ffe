"""The order in which a TPU's kernel visits the tiles of scores, and the blocks that it loads.

A grid has an axis for each of these letters, the last one the fastest:

| letter | axis |
|---|---|
| `r` | rows of the batch |
| `n` | query heads; or `h` and `g`: key/value heads, and the query heads of each |
| `t` | visits of a list: the blocks of queries in order, each with its blocks of keys |
| `i`, `j` | instead of `t`: all blocks of queries, all blocks of keys |

The `inner` axes, which results are summed over, are last, because only consecutive steps can visit
a block of results again.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from flax_mha.base.coordinates import Array
from flax_mha.base.shapes import lead
from flax_mha.kernels.flex.operand import Operand
from flax_mha.kernels.xla.tile_plan import Plan
from flax_mha.masks import EMPTY
from flax_mha.masks.states import is_static

# A visit is one integer: the blocks, two flags, and two bits for the state.
_BEGIN, _END, _STATE, _FLAGS = 8, 4, 3, 4


class Step(NamedTuple):
    """A step of a kernel: its row, heads and blocks, all scalars.

    Attributes:
      near: the block of keys, counted from the first of its stretch.
      state: the state of the tile under the mask.
      begin: True at the first visit of a block of queries.
      end: True at its last visit.
      first: True at the first step of a sum over the inner axes, in a running kernel.
      last: True at its last step.
    """

    r: Any
    n: Any
    h: Any
    i: Any
    j: Any
    near: Any
    state: Any
    begin: Any
    end: Any
    first: Any = None
    last: Any = None


class Blocked(NamedTuple):
    """An array or its shape, with the blocks that steps read or write."""

    array: Any
    block: pl.BlockSpec


# The lists of visits of stretches of keys, int32 [stretches, rows|1, heads|1, steps], and the steps
# to take in each stretch, int32 [stretches], or None for all.
Visits: TypeAlias = tuple[jax.Array, jax.Array | None]


def list_visits(states: Array, plan: Plan, width: int) -> Visits:
    """List the visits of stretches of `width` blocks of keys, by states [rows|1, heads|1, nq, nk].

    A block of queries that sees no key of a stretch has one visit, of an empty tile. Shorter lists
    end in empty visits of their last tile, which load nothing.
    """
    xp: Any = np if is_static(states) else jnp
    *lines, nq, nk = states.shape
    count = -(-nk // width)
    states = xp.pad(states.astype(np.int32), [(0, 0)] * 3 + [(0, count * width - nk)])
    states = xp.moveaxis(states.reshape(*lines, nq, count, width), -2, 0)
    visited, first = states > EMPTY, lead(np.arange(width) == 0, 5)
    visited = visited | ~visited.any(-1, keepdims=True) & first
    visited, states = (x.reshape(count, *lines, nq * width) for x in (visited, states))
    some = visited.sum(-1, keepdims=True, dtype=np.int32)
    order = xp.argsort(~visited, axis=-1, stable=True).astype(np.int32)
    if is_static(states):
        order = order[..., : int(np.max(some))]
    steps = lead(np.arange(order.shape[-1], dtype=np.int32), 4)
    exists = steps < some
    order = xp.take_along_axis(order, xp.minimum(steps, some - 1), -1)
    state, i = xp.where(exists, xp.take_along_axis(states, order, -1), EMPTY), order // width
    begin = exists & ((steps == 0) | (i != xp.roll(i, 1, -1)))
    end = exists & ((steps == some - 1) | (i != xp.roll(i, -1, -1)))
    words = (i << _bits(plan) | order % width) << _FLAGS | state
    for flag, is_set in ((_BEGIN, begin), (_END, end)):
        words = words | xp.where(is_set, np.int32(flag), np.int32(0))
    is_known = count == 1 and is_static(states)
    counts = None if is_known else jnp.asarray(xp.max(some, (1, 2, 3)), jnp.int32)
    return jnp.asarray(words, jnp.int32), counts


def _bits(plan: Plan) -> int:
    """Return the number of bits of the index of a block of keys."""
    return (plan.nk - 1).bit_length()


class TileOrder(NamedTuple):
    """An order of tiles, by a table of visits or of states.

    Attributes:
      axes: the letters of the grid's axes.
      sizes: their sizes; the last can be traced.
      inner: the number of last axes that a result is summed over.
      table: visits, int32 [rows|1, heads|1, steps], or states, int32 [rows|1, heads|1, nq, nk].
      start: the first block of keys of the stretch.
      plan: the division into tiles.
    """

    axes: str
    sizes: tuple[Any, ...]
    inner: int
    table: jax.Array
    start: Any
    plan: Plan

    @classmethod
    def of(
        cls, axes: str, inner: int, table: jax.Array, plan: Plan, heads: Sequence[int],
        count: jax.Array | None = None, start: Any = 0,
    ) -> "TileOrder":  # fmt: skip
        """Return an order for this device's batch rows and query heads, `heads`.

        `count` is the number of visits to make, of all by default.
        """
        R, N = heads
        G = plan.dims.G
        sizes = {
            "r": R, "n": N, "h": N // G, "g": G, "i": plan.nq, "j": plan.nk,
            "t": table.shape[-1] if count is None else count,
        }  # fmt: skip
        return cls(axes, tuple(sizes[a] for a in axes), inner, table, start, plan)

    @property
    def prefetched(self) -> list[jax.Array]:
        """The arrays that a kernel reads from scalar memory: two numbers, and the table.

        The numbers are the start, and the size of the grid's last axis. If that is traced,
        `pl.num_programs` would be wrong under `vmap` where JAX interprets kernels, as in tests.
        """
        bounds = jnp.stack([jnp.asarray(x, jnp.int32) for x in (self.start, self.sizes[-1])])
        return [bounds, jnp.asarray(self.table, jnp.int32).reshape(-1)]

    def step_at(self, ids: Sequence[Any], bounds: Any, table: Any) -> Step:
        """Return the step at indices of the grid, from the arrays that are `prefetched`."""
        at = dict(zip(self.axes, ids, strict=True))
        G, (rows, heads, *last) = self.plan.dims.G, self.table.shape
        r, n = at["r"], at["n"] if "n" in at else at["h"] * G + at["g"]
        h = at["h"] if "h" in at else lax.div(n, jnp.int32(G))
        line = (r if rows > 1 else 0) * heads + (n if heads > 1 else 0)
        if "t" not in at:
            i, j, no = at["i"], at["j"], jnp.bool_(False)
            return Step(r, n, h, i, j, j, table[(line * last[0] + i) * last[1] + j], no, no)
        word, bits = table[line * last[0] + at["t"]], _bits(self.plan)
        i, near = word >> (_FLAGS + bits), word >> _FLAGS & ((1 << bits) - 1)
        # The last of several stretches may be shorter.
        j = bounds[0] + near
        j = near if isinstance(self.start, int) else jnp.minimum(j, self.plan.nk - 1)
        flags = (word & flag != 0 for flag in (_BEGIN, _END))
        return Step(r, n, h, i, j, near, word & _STATE, *flags)

    def current(self, bounds: Any, table: Any) -> Step:
        """Return a running kernel's step."""
        ids = [pl.program_id(axis) for axis in range(len(self.axes))]
        sizes, outer = (*self.sizes[:-1], bounds[1]), len(ids) - self.inner
        first, last = jnp.bool_(True), jnp.bool_(True)
        for n, size in zip(ids[outer:], sizes[outer:], strict=True):
            first, last = first & (n == 0), last & (n == size - 1)
        return self.step_at(ids, bounds, table)._replace(first=first, last=last)

    def blocks(self, x: Any, axes: str) -> Blocked:
        """Divide an array into blocks.

        `axes` has the coordinate of a step for each axis, or `.` for none. Blocks have two axes.
        """
        sizes = {"i": self.plan.block_q, "j": self.plan.block_k}
        shape = [sizes.get(a, n) for a, n in zip(axes[-2:], x.shape[-2:], strict=True)]

        def index(*args: Any) -> tuple[Any, ...]:
            step = self.step_at(args[: len(self.axes)], *args[-2:])
            return tuple(0 if a == "." else getattr(step, a) for a in axes)

        return Blocked(x, pl.BlockSpec((*[None] * (len(axes) - 2), *shape), index))

    def shared(self, x: Any, last: str = "..") -> Blocked:
        """Divide an array that rows or heads may share, by the coordinates of its last axes."""
        pairs = zip("rn", x.shape[:-2], strict=False)
        return self.blocks(x, "".join(a if size > 1 else "." for a, size in pairs) + last)


# The coordinates of the last two axes of an operand's array. Columns are stored as rows, because
# Mosaic pads the last axis.
LAST = {"tile": "ij", "column": ".i", "row": ".j", "one": "..", "whole": ".."}


def block_at(index: Any, size: int) -> Any:
    """Return the places of a block along an axis."""
    return pl.ds(pl.multiple_of(index * size, size), size)


def batch_first(x: jax.Array) -> jax.Array:
    """Return x, whose first axis is the one that a `vmap` around the kernel maps, if there is one.

    Mosaic refuses blocks that leave out the last axis. JAX moves a mapped axis to the front before
    a reshape, and XLA removes the reshape.
    """
    return lax.squeeze(lax.reshape(x, (1, *x.shape)), (0,))


def read(operand: Operand, ref: Any, swapped: bool) -> jax.Array:
    """Load the block of an operand's array, for a tile of queries × keys, or keys × queries."""
    x = ref[...]
    x = turn(operand, x.astype(jnp.int32) if x.dtype == jnp.int8 else x, swapped)
    return x != 0 if operand.dtype == jnp.bool_ else x


def turn(operand: Operand, x: jax.Array, swapped: bool) -> jax.Array:
    """Turn a block of an operand's array from its order in memory to that in a tile, or back."""
    is_turned = {"column": not swapped, "row": swapped, "tile": swapped}
    return x.T if is_turned.get(operand.layout, False) else x
