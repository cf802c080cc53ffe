"""How a call is divided into tiles: sizes, which to visit, and the arrays laid out for it."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flax_mha.grid import Array, At, Grid, blocks, tiles_of
from flax_mha.kernels.spec import AttentionSpec
from flax_mha.masks import EMPTY, FULL, PARTIAL, Mask
from flax_mha.masks.base import known
from flax_mha.shapes import Dims

Tree = Any


class Plan(NamedTuple):
    """How a call is divided. Hashable: all of it is known before tracing.

    Attributes:
      dims: of the call.
      block_q: queries of a tile.
      block_k: keys of a tile.
      full: whether there may be tiles that need no mask.
      partial: whether there may be tiles that do.
    """

    dims: Dims
    block_q: int
    block_k: int
    full: bool = True
    partial: bool = True

    @property
    def nq(self) -> int:
        """Blocks of queries."""
        return -(-self.dims.T // self.block_q)

    @property
    def nk(self) -> int:
        """Tiles of keys for each."""
        return -(-self.dims.S // self.block_k)


class Tables(NamedTuple):
    """Which tiles each block of queries visits, int32 [rows|1, N|1, nq, ·].

    Attributes:
      order: tiles of keys [nk], the full ones first, then the partial, then the empty.
      full: how many are full [].
      some: how many are not empty [].
    """

    order: Array
    full: Array
    some: Array


def plan_call(spec: AttentionSpec, dims: Dims) -> tuple[Plan, Tables]:
    """Divides the call, and asks the mask about each tile."""
    if spec.mask is None:
        plan = Plan(dims, even(dims.T, 256), even(dims.S, 4096))
        return _tables(plan, np.full((1, 1, plan.nq, plan.nk), FULL))
    choices = []
    for size in _COST:
        plan = Plan(dims, even(dims.T, size), even(dims.S, size))
        verdict = _ask(spec.mask, spec.at(dims), plan)
        if not known(verdict):
            # What will be visited is not known yet: the fastest tiles.
            return _tables(plan, verdict)
        visited = (verdict > EMPTY).mean() * plan.nq * plan.nk
        cost = visited * plan.block_q * plan.block_k * _COST[size]
        choices.append((cost, plan, verdict))
    _, plan, verdict = min(choices, key=lambda choice: choice[0])
    return _tables(plan, verdict)


# Time for each score in tiles of that size, relative to the fastest: XLA:CPU runs a product of
# 512 × 64 × 512 on several cores, and one of 256 × 64 × 256 on one (measured on two cores).
_COST = {512: 1.0, 256: 1.5, 128: 1.55}


def even(length: int, most: int) -> int:
    """The size of the fewest equal blocks of at most that many."""
    return -(-length // -(-length // most))


def _ask(mask: Mask, at: At, plan: Plan) -> Array:
    """What the mask says of each tile, [rows|1, N|1, nq, nk]."""
    verdict = mask.tiles(tiles_of(at.q, at.k, plan.block_q, plan.block_k))
    xp = np if known(verdict) else jnp
    whole = np.broadcast_shapes(verdict.shape, (1, 1, plan.nq, plan.nk))
    verdict = flat_batch(xp.broadcast_to(verdict, whole), plan.dims)
    if plan.dims.S % plan.block_k:
        # The last tile of keys reaches beyond the last key.
        last = (np.arange(plan.nk) == plan.nk - 1) & (verdict == FULL)
        verdict = xp.where(last, np.int8(PARTIAL), verdict)
    return verdict


def _tables(plan: Plan, verdict: Array) -> tuple[Plan, Tables]:
    if known(verdict):
        full, partial = ((verdict == kind).any() for kind in (FULL, PARTIAL))
        plan = plan._replace(full=bool(full), partial=bool(partial))
    xp = np if known(verdict) else jnp
    order = xp.argsort(-verdict.astype(np.int32), axis=-1, stable=True)
    tables = (order, (verdict == FULL).sum(-1), (verdict > EMPTY).sum(-1))
    return plan, Tables(*(x.astype(np.int32) for x in tables))


class Place(NamedTuple):
    """Where a block of queries, or one of its tiles, is."""

    row: jax.Array
    head: jax.Array
    i: jax.Array
    tile: jax.Array | int = 0

    @classmethod
    def of(cls, plan: Plan, r: jax.Array, j: jax.Array) -> "Place":
        """The place of job j of row-and-key/value-head r, see `rows`."""
        G, K = plan.dims.G, plan.dims.K
        return cls(r // K, (r % K) * G + j // plan.nq, j % plan.nq)

    def take(self, x: jax.Array) -> jax.Array:
        """The block [bq|1, bk|1] of x [rows|1, N|1, nq|1, bq|1, nk|1, bk|1]."""
        sizes = (1, 1, 1, x.shape[3], 1, x.shape[5])
        return lax.dynamic_slice(x, self._starts(x), sizes).reshape(x.shape[3], x.shape[5])

    def add(self, x: jax.Array, block: jax.Array) -> jax.Array:
        """Gives x with the block added."""
        block = (self.take(x) + block).reshape(1, 1, 1, x.shape[3], 1, x.shape[5])
        return lax.dynamic_update_slice(x, block, self._starts(x))

    def _starts(self, x: jax.Array) -> list[jax.Array | int]:
        at = (self.row, self.head, self.i, 0, self.tile, 0)
        return [
            0 if size == 1 else jnp.int32(start) for start, size in zip(at, x.shape, strict=True)
        ]


def rows(x: jax.Array, block: int, K: int) -> jax.Array:
    """[*B, L, K·g, F] as [rows·K, g·(number of blocks), block, F]; the last block filled with 0."""
    *B, L, M, F = x.shape
    x = jnp.swapaxes(x, -3, -2).reshape(math.prod(B) * K, M // K, L, F)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -L % block), (0, 0)))
    return x.reshape(x.shape[0], -1, block, F)


def lay(spec: AttentionSpec, plan: Plan) -> AttentionSpec:
    """The spec with each grid as [rows|1, N|1, nq|1, bq|1, nk|1, bk|1]."""

    def divide(x: Array) -> Array:
        by_query = blocks(flat_batch(jnp.asarray(x), plan.dims), -2, plan.block_q)
        return blocks(by_query, -1, plan.block_k)

    return map_grids(divide, spec)


def flat_batch(x: Array, dims: Dims) -> Array:
    """[*B|1, ...] as [rows|1, ...], for the four axes over the scores."""
    batch = x.shape[:-3]
    if all(size == 1 for size in batch):
        return x.reshape(1, *x.shape[-3:])
    xp = np if isinstance(x, np.ndarray) else jnp
    return xp.broadcast_to(x, (*dims.B, *x.shape[-3:])).reshape(-1, *x.shape[-3:])


def map_grids(fn: Callable, tree: Tree, other: Callable = lambda x: x) -> Tree:
    """Applies fn to the arrays of grids, and other to the remaining leaves."""
    return jax.tree.map(
        lambda x: Grid(fn(x.array)) if isinstance(x, Grid) else other(x),
        tree,
        is_leaf=lambda x: isinstance(x, Grid),
    )


class Form(NamedTuple):
    """How a call is divided, and how its spec is taken apart and put together again.

    Attributes:
      plan: the division.
      tree: the structure of the spec.
      floating: which of its leaves are floating point, and so take gradients.
      grids: which lie over the scores.
    """

    plan: Plan
    tree: Any
    floating: tuple[bool, ...]
    grids: tuple[bool, ...]

    @classmethod
    def of(cls, plan: Plan, spec: AttentionSpec) -> "Form":
        """The form of a spec that is laid out."""
        leaves, tree = jax.tree.flatten(spec)
        floating = (jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in leaves)
        grids = jax.tree.leaves(map_grids(lambda _: True, spec, other=lambda _: False))
        return cls(plan, tree, tuple(map(bool, floating)), tuple(grids))

    def spec(self, learned: list[jax.Array], rest: list[jax.Array]) -> AttentionSpec:
        """The spec of those leaves."""
        learned, rest = list(learned), list(rest)
        leaves = [learned.pop(0) if f else rest.pop(0) for f in self.floating]
        return jax.tree.unflatten(self.tree, leaves)

    def split(self, spec: AttentionSpec) -> tuple[list[jax.Array], list[jax.Array]]:
        """The leaves of a spec of this form: those that are learned, and the rest."""
        leaves = list(zip(jax.tree.leaves(spec), self.floating, strict=True))
        return [x for x, f in leaves if f], [x for x, f in leaves if not f]

    @property
    def learned_grids(self) -> list[bool]:
        """Which of the learned leaves lie over the scores."""
        return [g for g, f in zip(self.grids, self.floating, strict=True) if f]
