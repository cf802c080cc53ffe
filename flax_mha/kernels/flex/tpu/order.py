"""The order in which a TPU's kernel visits the tiles of scores, and the blocks that it loads.

A kernel's grid has an axis for each of these letters. The last axis is the fastest:

| letter | axis |
|---|---|
| `r` | rows of the batch |
| `n` | query heads; or `h` and `g`: key/value heads, and the query heads of each |
| `c` | stretches of adjacent blocks of keys |
| `t` | visited tiles, from a list: blocks of queries in order, each with its blocks of keys |
| `i`, `j` | instead of `t`: all blocks of queries, all blocks of keys |

Results are summed over the `inner` axes. They are the fastest, because a block of results may only
be visited again in consecutive steps.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from flax_mha.base.coordinates import Array
from flax_mha.base.shapes import lead
from flax_mha.kernels.flex.operand import Operand
from flax_mha.kernels.tile_plan import Plan
from flax_mha.masks import EMPTY
from flax_mha.masks.tiles import is_static

# A visit is one integer: the blocks, two flags, and two bits for the state.
_BEGIN, _END, _STATE, _FLAGS = 8, 4, 3, 4


class Step(NamedTuple):
    """A step of a kernel: its row, heads, blocks and stretch of keys, all scalars.

    Attributes:
      state: the state of the tile under the mask.
      begin: true at the first visit of a block of queries in its list.
      end: true at the last one.
    """

    r: Any
    n: Any
    h: Any
    i: Any
    j: Any
    c: Any
    state: Any
    begin: Any
    end: Any


def _bits(plan: Plan) -> int:
    """Return the number of bits of the index of a block of keys."""
    return (plan.nk - 1).bit_length()


def list_visits(states: Array, plan: Plan, width: int) -> jax.Array:
    """Return the lists of visits, int32 [rows|1, heads|1, stretches, steps].

    The states of tiles are [rows|1, heads|1, nq, nk], and a stretch has `width` blocks of keys. A
    block of queries that sees no key has one visit, of an empty tile. Lists of several rows or
    heads end in empty visits of the last tile, which load nothing.
    """
    xp: Any = np if is_static(states) else jnp
    *lines, nq, nk = states.shape
    count = -(-nk // width)
    states = xp.pad(states, [(0, 0)] * 3 + [(0, count * width - nk)])
    states = xp.moveaxis(states.reshape(*lines, nq, count, width), -2, -3)
    visited = states > EMPTY
    first = lead(np.arange(width) == 0, 5)
    visited = visited | ~visited.any(-1, keepdims=True) & first
    visited, states = (x.reshape(*lines, count, nq * width) for x in (visited, states))
    some = visited.sum(-1, keepdims=True, dtype=np.int32)
    order = xp.argsort(~visited, axis=-1, stable=True).astype(np.int32)
    if is_static(states):
        order = order[..., : some.max()]
    steps = lead(np.arange(order.shape[-1], dtype=np.int32), 4)
    exists = steps < some
    # The last stretch may be shorter.
    i, j = (
        order // width,
        order % width + lead(width * np.arange(count, dtype=np.int32)[:, None], 4),
    )
    state = xp.where(exists, xp.take_along_axis(states.astype(np.int32), order, -1), EMPTY)
    begin = exists & ((steps == 0) | (i != xp.roll(i, 1, -1)))
    end = exists & ((steps == some - 1) | (i != xp.roll(i, -1, -1)))
    blocks = i << _bits(plan) | xp.minimum(j, nk - 1)
    words = blocks << _FLAGS | state
    for flag, is_set in ((_BEGIN, begin), (_END, end)):
        words = words | xp.where(is_set, np.int32(flag), np.int32(0))
    last = xp.take_along_axis(words, some - 1, -1) >> _FLAGS << _FLAGS
    return jnp.asarray(xp.where(exists, words, last), jnp.int32)


class TileOrder(NamedTuple):
    """The static part of an order of tiles. A table of visits, or of states, holds the rest.

    Attributes:
      axes: the letters of the grid's axes.
      sizes: the sizes of the grid's axes.
      inner: the number of last axes that a result is summed over.
      table: the shape of the table: [rows|1, heads|1, stretches, steps] of visits, or [rows|1,
        heads|1, nq, nk] of states.
      plan: the division into tiles.
    """

    axes: str
    sizes: tuple[int, ...]
    inner: int
    table: tuple[int, ...]
    plan: Plan

    @classmethod
    def of(
        cls, axes: str, inner: int, table: jax.Array, plan: Plan, rows: int, heads: int
    ) -> "TileOrder":
        """Return an order for the batch rows and query heads on this device."""
        G, (stretches, steps) = plan.dims.G, table.shape[2:]
        sizes = {
            "r": rows, "n": heads, "h": heads // G, "g": G, "i": plan.nq, "j": plan.nk,
            "c": stretches, "t": steps,
        }  # fmt: skip
        return cls(axes, tuple(sizes[a] for a in axes), inner, table.shape, plan)

    def step_at(self, ids: Sequence[Any], table: Any) -> Step:
        """Return the step at indices of the grid, from the table in memory, flat."""
        at = dict(zip(self.axes, ids, strict=True))
        G, (rows, heads, *last) = self.plan.dims.G, self.table
        n = at["n"] if "n" in at else at["h"] * G + at["g"]
        h = at["h"] if "h" in at else lax.div(n, jnp.int32(G))
        line = (at["r"] if rows > 1 else 0) * heads + (n if heads > 1 else 0)
        c, no = at.get("c", 0), jnp.bool_(False)
        if "t" not in at:
            i, j = at["i"], at["j"]
            return Step(at["r"], n, h, i, j, c, table[(line * last[0] + i) * last[1] + j], no, no)
        word = table[(line * last[0] + c) * last[1] + at["t"]]
        block, bits = word >> _FLAGS, _bits(self.plan)
        i, j = block >> bits, block & ((1 << bits) - 1)
        flags = (word & flag != 0 for flag in (_BEGIN, _END))
        return Step(at["r"], n, h, i, j, c, word & _STATE, *flags)

    def current(self, table: Any) -> tuple[Step, list[Any]]:
        """Return a running kernel's step, and its indices of the inner axes."""
        ids = [pl.program_id(axis) for axis in range(len(self.axes))]
        return self.step_at(ids, table), ids[len(ids) - self.inner :]

    def block(self, shape: Sequence[int | None], axes: str) -> pl.BlockSpec:
        """Return an array's blocks, with the coordinate of a step for each axis (`.` for none)."""

        def index(*args: Any) -> tuple[Any, ...]:
            step = self.step_at(args[: len(self.axes)], args[-1])
            return tuple(0 if a == "." else getattr(step, a) for a in axes)

        return pl.BlockSpec((*[None] * (len(axes) - len(shape)), *shape), index)

    def block_of(self, operand: Operand, x: Any) -> pl.BlockSpec:
        """Return the blocks of an operand's array. Columns are rows: Mosaic pads the last axis."""
        if operand.layout == "whole":
            return self.block(x.shape, "." * x.ndim)
        lead = ("r" if x.shape[0] > 1 else ".") + ("n" if x.shape[1] > 1 else ".")
        shape = operand.shape[::-1] if operand.layout == "column" else operand.shape
        return self.block(shape, lead + _BLOCKS[operand.layout])


# The coordinates of the last two axes of an operand's layout.
_BLOCKS = {"tile": "ij", "column": ".i", "row": ".j", "one": "..", "whole": ".."}


def read(operand: Operand, ref: Any, swapped: bool) -> jax.Array:
    """Load the block of an operand's array, for a tile of queries × keys, or keys × queries."""
    x = ref[...]
    x = x.astype(jnp.int32) if operand.dtype == jnp.bool_ else x
    is_turned = {"column": not swapped, "row": swapped, "tile": swapped}
    x = x.T if is_turned.get(operand.layout, False) else x
    return x != 0 if operand.dtype == jnp.bool_ else x
