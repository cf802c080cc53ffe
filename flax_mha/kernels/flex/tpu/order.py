"""The order of a Pallas kernel's visits to the tiles of scores, and the blocks that it loads.

A kernel's grid has an axis for each of these letters. The last axis is the fastest:

| letter | axis |
|---|---|
| `r` | rows of the batch |
| `n` | query heads; or `k` and `g`: key/value heads, and the query heads of each |
| `i`, `j` | blocks of queries, blocks of keys |
| `t` | the tiles of a block of queries (or keys) that are not empty, one by one |

Results are summed over the `inner` axes. They are the fastest, because a block of results may only
be visited again in consecutive steps.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flax_mha.base.coordinates import Array
from flax_mha.kernels.flex.operand import Operand
from flax_mha.kernels.tile_plan import Plan, make_visit_lists
from flax_mha.masks import EMPTY, FULL, PARTIAL


class FlexTile(NamedTuple):
    """The row, heads and blocks of a tile, and its state under the mask, all scalars."""

    r: jax.Array
    n: jax.Array
    h: jax.Array
    i: jax.Array
    j: jax.Array
    state: jax.Array


class TileOrder(NamedTuple):
    """The static part of an order of tiles. Tables hold the rest.

    Attributes:
      axes: the letters of the grid's axes.
      sizes: the sizes of the grid's axes.
      inner: the number of last axes that a result is summed over.
      lines: the rows and heads of the tables.
      group: the number of query heads per key/value head.
    """

    axes: str
    sizes: tuple[int, ...]
    inner: int
    lines: tuple[int, int]
    group: int

    @classmethod
    def of(
        cls, axes: str, inner: int, states: Array, plan: Plan, visits: tuple[int, int],
        rows: int, heads: int,
    ) -> "tuple[TileOrder, list[jax.Array]]":  # fmt: skip
        """Return an order and its tables, for states [rows|1, heads|1, nq, nk] of the tiles.

        `visits` are the maximum numbers of visited tiles of a block of queries, and of a block of
        keys. `rows` and `heads` count the batch rows and query heads on this device.
        """
        G = plan.dims.G
        sizes = {"r": rows, "n": heads, "k": heads // G, "g": G, "i": plan.nq, "j": plan.nk}
        tables: tuple[Array, ...] = (states,)
        if "t" in axes:
            by_query = "i" in axes
            sizes["t"] = visits[0 if by_query else 1]
            visited, full, some = make_visit_lists(states if by_query else states.swapaxes(-1, -2))
            tables = (visited[..., : sizes["t"]], full, some)
        lines = (states.shape[0], states.shape[1])
        order = cls(axes, tuple(sizes[a] for a in axes), inner, lines, G)
        # Flat, because scalar memory pads the last axis to 128.
        return order, [jnp.asarray(x, jnp.int32).reshape(-1) for x in tables]

    def index_at(self, ids: Sequence[Any], tables: Sequence[Any]) -> FlexTile:
        """Return the tile at indices of the grid."""
        at = dict(zip(self.axes, ids, strict=True))
        sizes = dict(zip(self.axes, self.sizes, strict=True))
        r = at["r"]
        n = at["n"] if "n" in at else at["k"] * self.group + at["g"]
        line = (r if self.lines[0] > 1 else 0) * self.lines[1] + (n if self.lines[1] > 1 else 0)
        if "t" not in at:
            i, j = at["i"], at["j"]
            state = tables[0][(line * sizes["i"] + i) * sizes["j"] + j]
        else:
            by_query = "i" in at
            major = "i" if by_query else "j"
            entry = line * sizes[major] + at[major]
            visited, full, some = tables
            # Steps beyond the last tile keep its blocks, so that they load none.
            t = jnp.clip(at["t"], 0, jnp.maximum(some[entry] - 1, 0))
            other = visited[entry * sizes["t"] + t]
            i, j = (at["i"], other) if by_query else (other, at["j"])
            state = jnp.where(at["t"] < full[entry], FULL, PARTIAL)
            state = jnp.where(at["t"] < some[entry], state, EMPTY)
        return FlexTile(r, n, lax.div(n, jnp.int32(self.group)), i, j, state)

    def current(self, tables: Sequence[Any]) -> tuple[FlexTile, jax.Array, jax.Array]:
        """Return a running kernel's tile, and flags for the begin and the end of a sum."""
        ids = [pl.program_id(axis) for axis in range(len(self.axes))]
        first, last = jnp.bool_(True), jnp.bool_(True)
        for n in range(len(ids) - self.inner, len(ids)):
            first, last = first & (ids[n] == 0), last & (ids[n] == self.sizes[n] - 1)
        return self.index_at(ids, tables), first, last

    def block(self, shape: Sequence[int | None], axes: str) -> pl.BlockSpec:
        """Return an array's blocks, with the tile coordinate of each axis (`.` for none)."""

        def index(*args: Any) -> tuple[Any, ...]:
            tile = self.index_at(args[: len(self.axes)], args[len(self.axes) + 2 :])
            return tuple(0 if a == "." else getattr(tile, a) for a in axes)

        return pl.BlockSpec(tuple(shape), index)


# The tile coordinates of the last two axes of an operand's layout.
_AXES = {"tile": "ij", "column": ".i", "row": ".j", "one": "..", "whole": ".."}


def blocks_of(operand: Operand, order: TileOrder, x: Any) -> pl.BlockSpec:
    """Return the blocks of an operand's array. Columns are rows: Mosaic pads the last axis."""
    if operand.layout == "whole":
        return order.block(x.shape, "." * x.ndim)
    lead = ("r" if x.shape[0] > 1 else ".") + ("n" if x.shape[1] > 1 else ".")
    shape = operand.shape[::-1] if operand.layout == "column" else operand.shape
    return order.block((None, None, *shape), lead + _AXES[operand.layout])


def read(operand: Operand, ref: Any) -> jax.Array:
    """Load the block of an operand's array."""
    x = ref[...]
    x = x.T if operand.layout == "column" else x
    return x.astype(jnp.int32) != 0 if operand.dtype == jnp.bool_ else x
