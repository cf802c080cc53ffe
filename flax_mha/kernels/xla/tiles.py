"""The arrays of a call in tiles: layout, slicing, scores and gradients of a tile."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flax_mha.base import shapes, symbols
from flax_mha.base.coordinates import (
    Array,
    At,
    blocks,
    flat_batch,
    is_score_array,
    map_score_arrays,
)
from flax_mha.base.trees import combine, is_array, is_inexact, partition
from flax_mha.kernels.call.spec import AttentionSpec, Result, Sums
from flax_mha.kernels.xla import softmax
from flax_mha.kernels.xla.tile_plan import KeyRange, Plan
from flax_mha.scores import Vectors

Tree = Any


class TileIndex(NamedTuple):
    """The indices of a block of queries and of adjacent tiles of keys."""

    row: jax.Array
    head: jax.Array
    i: jax.Array | int
    tile: jax.Array | int
    width: int = 1

    @classmethod
    def of_row(cls, plan: Plan, r: jax.Array) -> "TileIndex":
        """Return the first tile of row and key/value head r of `fold_heads`."""
        row, head = _divide(r, plan.dims.K)
        return cls(row, head if plan.dims.G == 1 else head * plan.dims.G, 0, 0)

    def of_job(self, plan: Plan, part: KeyRange, j: Any) -> "TileIndex":
        """Return the tiles of job j of a key range, for this row and key/value head."""
        starts = part.starts
        member, block = _divide(j, part.count_blocks(plan.nq))
        head = self.head if plan.dims.G == 1 else self.head + member
        tile: Any = 0  # Without starts, the visit lists hold the tiles.
        if starts:
            tile = starts[0] if len({*starts}) == 1 else jnp.asarray(starts, jnp.int32)[block]
        return TileIndex(self.row, head, part.first + block, tile, part.width)

    def entry(self, x: Array) -> jax.Array:
        """Return the entry of this block of queries in a visit list [rows|1, N|1, nq, ...]."""
        at = (0 if x.shape[0] == 1 else self.row, 0 if x.shape[1] == 1 else self.head, self.i)
        return jnp.asarray(x)[at]

    def keys(self, x: jax.Array) -> jax.Array:
        """Return the tiles [width·bk, F] of x [nk, bk, F]."""
        if self.width != x.shape[0]:
            x = lax.dynamic_slice_in_dim(x, self.tile, self.width)
        return lax.collapse(x, 0, 2)

    def add_keys(self, x: jax.Array, block: jax.Array) -> jax.Array:
        """Add a block [F, width·bk] to its tiles of x, [nk, F, bk] or [1, F, nk·bk]."""
        block, axis, start = lax.expand_dims(block, (0,)), 0, self.tile
        if x.shape[0] == 1:
            axis, start = 2, self.tile * (block.shape[2] // self.width)
        block = lax.add(block, lax.dynamic_slice_in_dim(x, start, block.shape[axis], axis))
        return lax.dynamic_update_slice_in_dim(x, block, start, axis)

    def take(self, x: jax.Array) -> jax.Array:
        """Return the block [bq|1, width·bk|1] of x [rows|1, N|1, nq|1, bq|1, nk|1, bk|1]."""
        sizes = self._sizes(x)
        return lax.dynamic_slice(x, self._starts(x), sizes).reshape(sizes[3], sizes[4] * sizes[5])

    def add(self, x: jax.Array, block: jax.Array) -> jax.Array:
        """Add a block to its tiles of x, in the layout of `take`."""
        block = (self.take(x) + block).reshape(self._sizes(x))
        return lax.dynamic_update_slice(x, block, self._starts(x))

    def _sizes(self, x: jax.Array) -> tuple[int, ...]:
        return (1, 1, 1, x.shape[3], 1 if x.shape[4] == 1 else self.width, x.shape[5])

    def _starts(self, x: jax.Array) -> list[jax.Array]:
        at = (self.row, self.head, self.i, 0, self.tile, 0)
        # All int32, whatever JAX's default integer is.
        return [jnp.int32(0 if n == 1 else start) for start, n in zip(at, x.shape, strict=True)]


def fold_heads(x: jax.Array, block: int, K: int) -> jax.Array:
    """Reshape [*B, L, K·g, F] to [rows·K, g·blocks·block, F], padding the last block with 0.

    With more axes, XLA:CPU makes another copy if some of them are 1.
    """
    *B, L, _, F = x.shape
    x, full = jnp.swapaxes(x, -3, -2), -(-L // block) * block
    if full != L:
        x = jnp.pad(x, ((0, 0),) * (len(B) + 1) + ((0, full - L), (0, 0)))
    return x.reshape(math.prod(B) * K, x.shape[-3] // K * full, F)


def split_blocks(plan: Plan, x: jax.Array) -> jax.Array:
    """Reshape [G·nq·bq, F] to [G, nq, bq, F]."""
    return x.reshape(plan.dims.G, plan.nq, plan.block_q, -1)


def split_tiles(plan: Plan, *keyed: jax.Array) -> list[jax.Array]:
    """Reshape arrays [nk·bk, F] to [nk, bk, F]."""
    return [x.reshape(plan.nk, plan.block_k, -1) for x in keyed]


def init_key_sums(plan: Plan, x: jax.Array, dtype: Any) -> jax.Array:
    """Return zeros for sums over the tiles x [nk, bk, F], in the layout of `TileIndex.add_keys`.

    Tiles that are visited one by one are contiguous. In one array of all keys, the parts of a tile
    would be far apart, and evict each other from the cache.
    """
    tiles = 1 if plan.key_ranges else plan.nk
    return jnp.zeros((tiles, x.shape[-1], plan.nk * plan.block_k // tiles), dtype)


def join_key_sums(sums: jax.Array) -> jax.Array:
    """Reshape sums in the layout of `init_key_sums` to [nk·bk, F]."""
    return jnp.swapaxes(sums, 1, 2).reshape(-1, sums.shape[1])


def join(parts: Sequence[jax.Array]) -> jax.Array:
    """Join the blocks [G, ·, bq, ...] of all parts to [G·nq·bq, ...]."""
    x = parts[0] if len(parts) == 1 else lax.concatenate(parts, 1)
    return lax.collapse(x, 0, 3)


def tile_spec(spec: AttentionSpec, plan: Plan) -> AttentionSpec:
    """Return the spec with arrays over the scores as [rows|1, N|1, nq|1, bq|1, nk|1, bk|1]."""

    def divide(x: Array) -> Array:
        by_query = blocks(flat_batch(jnp.asarray(x), plan.dims), -2, plan.block_q)
        return blocks(by_query, -1, plan.block_k)

    return map_score_arrays(divide, spec)


def take_tile(plan: Plan, spec: AttentionSpec, index: TileIndex) -> tuple[AttentionSpec, At]:
    """Return the spec and the coordinates of a tile, all of rank 2.

    Parameters are in float32 at least. Otherwise each tile would round its part of their gradients.
    """
    spec = map_score_arrays(index.take, spec)
    parameters, others = partition(spec, lambda x: is_array(x) and is_inexact(x))
    parameters = jax.tree.map(lambda x: x.astype(shapes.wide(x.dtype)), parameters)
    spec = combine(parameters, others)
    q = index.i * plan.block_q + np.arange(plan.block_q, dtype=np.int32)[:, None]
    row, head = (x.reshape(1, 1) for x in (index.row, index.head))
    return spec, spec.override(At(row, head, q, key_indices(plan, index)[None]))


def key_indices(plan: Plan, index: TileIndex) -> Array:
    """Return the indices of a tile's keys [width·bk]."""
    return index.tile * plan.block_k + np.arange(index.width * plan.block_k, dtype=np.int32)


def compute_scores(
    plan: Plan, masked: bool, index: TileIndex, spec: AttentionSpec, at: At, s: jax.Array,
    vectors: Vectors | None,
) -> jax.Array:  # fmt: skip
    """Return a tile's scores from q·kᵀ: −∞ where masked, and beyond the last key."""
    s, _ = (spec if masked else spec.replace(mask=None)).apply(s, at, vectors=vectors)
    if masked and plan.dims.S % plan.block_k != 0:
        s = jnp.where(key_indices(plan, index)[None] < plan.dims.S, s, -jnp.inf)
    return s


def empty_result(dims: shapes.Dims, dtype: jnp.dtype, sinks: jax.Array | None) -> Result:
    """Return the result of a call with no queries or no keys: 0, and the sums of the sinks."""
    B, T, _, N, _, _, Hv = dims
    total = jnp.zeros((*B, N, T), shapes.wide(dtype))
    result = jnp.zeros((*B, T, N, Hv), dtype), Sums(softmax.begin(total), total)
    return result if sinks is None else softmax.merge_sinks(result, sinks)


class TiledCall(NamedTuple):
    """The static part of a tiled call.

    Attributes:
      plan: the division.
      scale: the factor of the scores; 1 if q is scaled.
      together: the number of rows and key/value heads that are computed at once.
      remat: True if JAX derives the loops, each block of queries under `jax.checkpoint`.
      pure: False if the call holds user-defined functions. See `trees.trace_once`.
    """

    plan: Plan
    scale: float
    together: int
    remat: bool
    pure: bool

    @classmethod
    def of(cls, plan: Plan, spec: AttentionSpec, scale: float, remat: bool) -> "TiledCall":
        """Return the static part of a call with a tiled spec."""
        nodes = jax.tree.leaves(spec, is_leaf=is_score_array)
        # Arrays with a row or head axis would become gathers in a batched loop.
        varies = any(is_score_array(x) and x.array.shape[:2] != (1, 1) for x in nodes)
        together = 1 if varies else plan.rows_together
        return cls(plan, scale, together, remat, pure=not spec.user_types())

    def apply_scale(self, x: jax.Array) -> jax.Array:
        """Scale x, unless the queries are already scaled."""
        return x if self.scale == 1 else x * self.scale

    def vectors(
        self, spec: AttentionSpec, q: jax.Array, k: jax.Array, dtype: Any
    ) -> Vectors | None:
        """Return a tile's queries and keys, if a score function reads them."""
        if not spec.vectors:
            return None
        return self.scale * q.astype(dtype), k.astype(dtype)


def add_grads(index: TileIndex, grads: Tree, tile: Tree) -> Tree:
    """Add a tile's gradients of learned leaves to the sums, if there are any."""
    if tile is None:
        return grads

    def add(g: Any, d: Any) -> Any:
        fn = index.add if is_score_array(g) else jnp.add
        return jax.tree.map(lambda x, y: fn(x, y.astype(x.dtype)), g, d)

    return jax.tree.map(add, grads, tile, is_leaf=is_score_array)


def tile_gradient(
    static: TiledCall, masked: bool, index: TileIndex, spec: AttentionSpec, q: jax.Array,
    k: jax.Array, v: jax.Array, dout: jax.Array, stats: jax.Array,
) -> tuple[jax.Array, jax.Array, Tree, Vectors | None]:  # fmt: skip
    """Return a tile's kept weights, and the gradients of q·kᵀ, learned leaves and vectors."""
    tile, at = take_tile(static.plan, spec, index)
    leaves, others = partition(tile, is_inexact)

    def score(s: jax.Array, leaves: Tree, vectors: Vectors | None) -> jax.Array:
        return compute_scores(static.plan, masked, index, combine(leaves, others), at, s, vectors)

    acc = stats.dtype
    top, share, delta = jnp.split(stats, 3, -1)
    product = static.apply_scale(dot(q, k, 1, 1, spec, acc))
    args = product, leaves, static.vectors(spec, q, k, acc)
    s, pull = jax.vjp(score, *args) if spec.scores else (score(*args), None)
    # exp(s − lse) would lose digits of large scores.
    p = lax.mul(lax.exp(lax.sub(s, top)), share)
    dp = spec.scale_kept(tile.apply_dropout(dot(dout, v, 1, 1, spec, acc), at))
    ds = softmax.gradient(p, dp, delta, masked)
    # Without score functions, ds is the gradient of q·kᵀ: masked weights p are 0.
    ds, dleaves, dvectors = (ds, None, None) if pull is None else pull(ds)
    if dvectors is not None:
        dvectors = static.apply_scale(dvectors[0]), dvectors[1]
    return tile.apply_dropout(p, at), static.apply_scale(ds), dleaves, dvectors


def dot(
    a: jax.Array, b: jax.Array, axis_a: int, axis_b: int, spec: AttentionSpec, dtype: Any
) -> jax.Array:
    """Return the matmul of a and b over one axis of each, in a dtype."""
    return lax.dot_general(
        a, b, (((axis_a,), (axis_b,)), ((), ())),
        precision=spec.precision, preferred_element_type=dtype,
    )  # fmt: skip


def _divide(index: Any, by: Any) -> tuple[Any, Any]:
    """Return the quotient and the remainder of an index ≥ 0."""
    if symbols.is_symbolic(by):
        return index // by, index % by
    if by == 1:
        return index, np.int32(0)
    # `//` and `%` take many more operations, for negative numbers.
    return lax.div(index, np.int32(by)), lax.rem(index, np.int32(by))
