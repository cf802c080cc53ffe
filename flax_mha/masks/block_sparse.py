"""Block-sparse masks, whose blocks of keys are selected by data."""

import functools
import math
import operator
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.tree_util import Partial

from flax_mha import sharding
from flax_mha.base import checks, shapes, symbols
from flax_mha.base.coordinates import Array, At, ScoreArray, Tiles, blocks, numpy_of
from flax_mha.base.shapes import Dims
from flax_mha.masks.algebra import Mask
from flax_mha.masks.positional import Causal
from flax_mha.masks.states import tile_state

# An index of a block that has no keys.
NO_BLOCK = np.int32(np.iinfo(np.int32).min)


class BlockSparse(Mask):
    """A mask in which each block of queries may attend to selected blocks of keys.

    The i-th query of the call may attend to position j if ⌊j / key_block⌋ is one of
    blocks[row, head, ⌊i / query_block⌋].

    Attributes:
      blocks: int, broadcastable to [*B, N, nq, k], the indices of k blocks of keys for each
        of nq = ⌈T / query_block⌉ blocks of queries. Indices that are negative or beyond the last
        key select nothing. They can be traced.
      query_block: the queries of a block.
      key_block: the keys of a block. The first block begins at position 0.

    Sources: Lu et al., "MoBA", 2025; Yuan et al., "Native Sparse Attention", 2025.
    """

    blocks: Any
    query_block: int = struct.field(pytree_node=False)
    key_block: int = struct.field(pytree_node=False)

    def bind(self, dims: Dims) -> Self:
        checks.positive(query_block=self.query_block, key_block=self.key_block)
        indices = checks.integers("BlockSparse.blocks", self.blocks)
        nq = (dims.T + self.query_block - 1) // self.query_block
        shapes.check_broadcasts(
            "BlockSparse.blocks", indices.shape, (*dims.B, dims.N, nq, indices.shape[-1]),
            "[*B, N, nq, k]",
            f"give {nq} blocks of {self.query_block} of the {dims.T} queries, and repeat the "
            f"blocks of a key/value head by jnp.repeat(blocks, N // K, axis=-3)",
        )  # fmt: skip
        xp = numpy_of(indices)
        # Replace negative and repeated ones.
        indices = xp.sort(indices, axis=-1)
        first = xp.full_like(indices[..., :1], NO_BLOCK)
        previous = xp.concatenate([first, indices[..., :-1]], axis=-1)
        indices = xp.where((indices == previous) | (indices < 0), NO_BLOCK, indices)
        indices = shapes.lead(indices, len(dims.logits))
        if not symbols.at_most(indices.shape[-2], 1):
            *lead, nq, k = indices.shape
            indices = xp.broadcast_to(indices[..., None, :], (*lead, nq, self.query_block, k))
            indices = indices.reshape(*lead, -1, k)[..., : dims.T, :]
        return self.replace(
            blocks=tuple(ScoreArray(indices[..., c : c + 1]) for c in range(indices.shape[-1]))
        )

    def allowed(self, at: At) -> Array:
        block = at.k // self.key_block
        return functools.reduce(operator.or_, (block == x.array for x in self.blocks))

    def tiles(self, tiles: Tiles) -> Array:
        first, last = (x[..., None, :] // self.key_block for x in (tiles.k_min, tiles.k_max))
        count: Any = 0
        for x in self.blocks:
            # Take one query of those with the same blocks. All shards have the same length.
            T = x.array.shape[-2]
            step = 1 if symbols.is_symbolic(T) else math.gcd(self.query_block, tiles.block_q, T)
            indices = blocks(x.array[..., ::step, :], -2, tiles.block_q // step)
            count = count + ((indices >= first) & (indices <= last)).astype(np.int32)
        return tile_state((count > 0).any(-2), (count > last - first).all(-2))

    def block_shape(self) -> tuple[int, int]:
        return self.query_block, self.key_block


def top_blocks(
    scores: Array, count: int, *, query_block: int, key_block: int,
    positions: Array | None = None, visible: Array | None = None,
) -> Mask:  # fmt: skip
    """Select for each block of queries the `count` earlier blocks of keys with the highest scores.

    A block of queries always gets its local blocks, which hold its positions.

    Args:
      scores: floating [*B, N|1, nq, nk], without gradients. A score of −∞ is never selected.
      count: the number of blocks to select, local ones included.
      query_block: the queries of a block.
      key_block: the keys of a block. The first block begins at position 0.
      positions: int [nq] or [*B, nq], the first position of each block of queries (default:
        consecutive blocks from 0).
      visible: bool, broadcastable to the scores, False for blocks to select never.

    Returns:
      `Causal() & BlockSparse(...)`.

    Raises:
      ValueError: if `count` is less than the number of local blocks.
    """
    checks.positive(count=count, query_block=query_block, key_block=key_block)
    scores = jax.lax.stop_gradient(jnp.asarray(checks.floating("scores", scores)))
    nq, nk = scores.shape[-2:]
    # Not infinities, which `jax_debug_infs` would report.
    most = float(jnp.finfo(scores.dtype).max)
    local = (query_block + key_block - 2) // key_block + 1
    if positions is None:
        positions = symbols.count_up(nq) * query_block
        if not (query_block % key_block and key_block % query_block):
            local = -(-query_block // key_block)
    if count < local:
        raise ValueError(
            f"count must be at least {local}, the blocks of {key_block} keys that {query_block} "
            f"queries can be in, got {count}; choose more, or take smaller blocks of queries"
        )
    at = shapes.per_token("positions", positions, (*scores.shape[:-3], nq), "nq")
    at = shapes.lead(at[..., None, :, None], scores.ndim)
    first, last = at // key_block, (at + query_block - 1) // key_block
    block = shapes.lead(symbols.count_up(nk), scores.ndim)
    # Local blocks get the maximum, which sorts before +∞ and NaN.
    scores = jnp.where(scores < most / 2, scores, most / 2)
    scores = jnp.where(block < first, scores, -most)
    scores = jnp.where((block >= first) & (block <= last), most, scores)
    if visible is not None:
        visible = checks.array("visible", visible)
        remedy = "give a bool for each block of queries and each block of keys"
        shapes.check_broadcasts("visible", visible.shape, scores.shape, "the scores", remedy)
        scores = jnp.where(shapes.lead(visible, scores.ndim), scores, -most)
    if symbols.is_symbolic(nk):
        # There may be fewer blocks than `count`.
        more = [(0, 0)] * (scores.ndim - 1) + [(0, count)]
        scores, nk = jnp.pad(scores, more, constant_values=-most), count
    count = min(count, nk)
    heads = "heads" if scores.ndim > 2 and scores.shape[-3] > 1 else None
    # Blocks of several queries need not divide over the mesh axis of the queries.
    names = ("batch", heads, "length" if query_block == 1 else None, None)
    out = (*scores.shape[:-1], count), names
    # XLA would gather the scores of all devices.
    indices = sharding.local(Partial(_top_k, count), [names], out, scores)
    return Causal() & BlockSparse(indices, query_block, key_block)


def _top_k(count: int, scores: jax.Array) -> jax.Array:
    """Return the indices of the highest scores on the last axis, −1 for the least number."""
    best, indices = jax.lax.top_k(scores, count)
    return jnp.where(best <= -jnp.finfo(scores.dtype).max, -1, indices)
