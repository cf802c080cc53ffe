"""In which order a Pallas kernel goes through the tiles of scores, and the blocks it needs there.

A grid of a kernel has an axis for each of these letters, the last the fastest:

| letter | what |
|---|---|
| `r` | rows of the batch |
| `n` | query heads; or `k` and `g`: key/value heads, and the query heads of each |
| `i`, `j` | blocks of queries, blocks of keys |
| `t` | the tiles of a block of queries (or keys) that the mask does not exclude, one by one |

The `inner` axes are those over which a result is summed, and so the fastest: blocks of results may
be visited again in consecutive steps only.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from flax_mha.base.coordinates import Array, flat_batch
from flax_mha.kernels.flex.mosaic import flat
from flax_mha.kernels.tile_plan import Plan, tables_of
from flax_mha.masks import EMPTY, FULL, PARTIAL


class Step(NamedTuple):
    """Where a step of a grid is, and what the mask says of that tile. Scalars."""

    r: jax.Array
    n: jax.Array
    h: jax.Array
    i: jax.Array
    j: jax.Array
    kind: jax.Array


class Walk(NamedTuple):
    """An order of tiles. What is known before tracing; the tables are the kernel's first arguments.

    Attributes:
      axes: the letters, see above.
      sizes: of the grid.
      inner: how many of the last axes a result is summed over.
      lines: rows and heads of the tables.
      group: query heads of each key/value head.
    """

    axes: str
    sizes: tuple[int, ...]
    inner: int
    lines: tuple[int, int]
    group: int

    @classmethod
    def of(
        cls, axes: str, inner: int, verdict: Array, plan: Plan, visits: tuple[int, int],
        rows: int, heads: int,
    ) -> "tuple[Walk, list[jax.Array]]":  # fmt: skip
        """The walk and its tables.

        Args:
          axes: see above.
          inner: see above.
          verdict: what the mask says of each tile, [rows|1, heads|1, nq, nk].
          plan: the division.
          visits: the most tiles of a block of queries that are not empty, and of a block of keys.
          rows: of the batch; like the heads, those of this device.
          heads: of queries.
        """
        G = plan.dims.G
        sizes = {"r": rows, "n": heads, "k": heads // G, "g": G, "i": plan.nq, "j": plan.nk}
        tables: tuple[Array, ...] = (verdict,)
        if "t" in axes:
            by_query = "i" in axes
            sizes["t"] = visits[0 if by_query else 1]
            order, full, some = tables_of(verdict if by_query else verdict.swapaxes(-1, -2))
            tables = (order[..., : sizes["t"]], full, some)
        lines = (verdict.shape[0], verdict.shape[1])
        walk = cls(axes, tuple(sizes[a] for a in axes), inner, lines, G)
        # Of one axis, for scalar memory fills the last up to 128.
        return walk, [jnp.asarray(x, jnp.int32).reshape(-1) for x in tables]

    def step(self, ids: Sequence[Any], tables: Sequence[Any]) -> Step:
        """The step at those indices of the grid."""
        at = dict(zip(self.axes, ids, strict=True))
        sizes = dict(zip(self.axes, self.sizes, strict=True))
        r = at["r"]
        n = at["n"] if "n" in at else at["k"] * self.group + at["g"]
        line = (r if self.lines[0] > 1 else 0) * self.lines[1] + (n if self.lines[1] > 1 else 0)
        if "t" not in at:
            i, j = at["i"], at["j"]
            kind = tables[0][(line * sizes["i"] + i) * sizes["j"] + j]
        else:
            by_query = "i" in at
            major = "i" if by_query else "j"
            entry = line * sizes[major] + at[major]
            order, full, some = tables
            # Steps beyond the last keep its blocks, so that none is loaded for them.
            t = jnp.clip(at["t"], 0, jnp.maximum(some[entry] - 1, 0))
            other = order[entry * sizes["t"] + t]
            i, j = (at["i"], other) if by_query else (other, at["j"])
            kind = jnp.where(at["t"] < full[entry], FULL, PARTIAL)
            kind = jnp.where(at["t"] < some[entry], kind, EMPTY)
        return Step(r, n, lax.div(n, jnp.int32(self.group)), i, j, kind)

    def here(self, tables: Sequence[Any]) -> tuple[Step, jax.Array, jax.Array]:
        """In a kernel: its step, whether a sum begins and whether it ends."""
        ids = [pl.program_id(axis) for axis in range(len(self.axes))]
        first, last = jnp.bool_(True), jnp.bool_(True)
        for n in range(len(ids) - self.inner, len(ids)):
            first, last = first & (ids[n] == 0), last & (ids[n] == self.sizes[n] - 1)
        return self.step(ids, tables), first, last

    def block(self, shape: Sequence[int | None], axes: str) -> pl.BlockSpec:
        """A block of an array; of each of its axes, which coordinate picks it (`.` for none)."""

        def index(*args: Any) -> tuple[Any, ...]:
            step = self.step(args[: len(self.axes)], args[len(self.axes) + 2 :])
            return tuple(0 if a == "." else getattr(step, a) for a in axes)

        return pl.BlockSpec(tuple(shape), index)


class Leaf(NamedTuple):
    """How an array of the mask or the scores reaches a kernel.

    Attributes:
      kind: `tile` of queries × keys, `column` of queries, `row` of keys, `one` of a row and a
        head, or `whole`.
      shape: of it in a tile, in two dimensions.
      dtype: in which functions see it.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: Any

    @property
    def learned(self) -> bool:
        """Whether it takes gradients."""
        return bool(jnp.issubdtype(self.dtype, jnp.floating))

    @property
    def axes(self) -> str:
        """Which coordinates pick its block beside row and head."""
        return {"tile": "ij", "column": ".i", "row": ".j", "one": "..", "whole": ".."}[self.kind]

    @property
    def block(self) -> tuple[int, ...]:
        """Its block's shape: columns lie as rows, for Mosaic fills the last axis up to 128."""
        return self.shape[::-1] if self.kind == "column" else self.shape

    def spec(self, walk: Walk, x: Any) -> pl.BlockSpec:
        """Its block at each step, of the array as `store` gives it."""
        if self.kind == "whole":
            return walk.block(x.shape, "." * x.ndim)
        lead = ("r" if x.shape[0] > 1 else ".") + ("n" if x.shape[1] > 1 else ".")
        return walk.block((None, None, *self.block), lead + self.axes)

    @classmethod
    def of(cls, x: Any, grid: bool, plan: Plan) -> "Leaf":
        """That of an array, which lies over the scores if it is of a `ScoreArray`."""
        dtype = jnp.result_type(x)
        if jnp.issubdtype(dtype, jnp.floating):
            dtype = dtype if grid and dtype == jnp.bfloat16 else jnp.dtype(jnp.float32)
        elif jnp.issubdtype(dtype, jnp.integer) and dtype != jnp.uint32:
            dtype = jnp.dtype(jnp.int32)
        if not grid:
            return cls("whole", flat(jnp.shape(x)), dtype)
        t, s = (n > 1 for n in jnp.shape(x)[-2:])
        kind = ("tile" if s else "column") if t else "row" if s else "one"
        return cls(kind, (plan.block_q if t else 1, plan.block_k if s else 1), dtype)

    def store(self, x: Any, plan: Plan) -> jax.Array:
        """The array as its blocks are cut from it."""
        dtype = self.dtype
        if dtype == jnp.bool_:
            # Truth values don't lie in memory; only tables are large enough to count.
            dtype = jnp.int8 if self.kind == "tile" else jnp.int32
        x = jnp.asarray(x).astype(dtype)
        if self.kind == "whole":
            return x.reshape(self.shape)
        x = jnp.asarray(flat_batch(x, plan.dims))
        missing = plan.nq * plan.block_q - plan.dims.T, plan.nk * plan.block_k - plan.dims.S
        fill = [(0, n if block > 1 else 0) for block, n in zip(self.shape, missing, strict=True)]
        x = jnp.pad(x, [(0, 0), (0, 0), *fill], mode="edge")
        return x.swapaxes(-1, -2) if self.kind == "column" else x

    def read(self, ref: Any) -> jax.Array:
        """The array in a tile."""
        x = ref[...]
        x = x.T if self.kind == "column" else x
        return x.astype(jnp.int32) != 0 if self.dtype == jnp.bool_ else x
