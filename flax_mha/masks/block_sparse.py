"""A mask of blocks of keys that data chooses."""

import functools
import math
import operator
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha import sharding
from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import Array, At, ScoreArray, Tiles, blocks
from flax_mha.base.shapes import Dims
from flax_mha.masks.base import Mask
from flax_mha.masks.positional import Causal
from flax_mha.masks.tiles import is_static, tile_state

# The most blocks of keys for one block of queries: each is an array, and a comparison a score.
MOST = 128
# The block of keys that no key is in.
NOWHERE = np.int32(np.iinfo(np.int32).min)


class BlockSparse(Mask):
    """Each block of queries sees the blocks of keys that are chosen for it.

    The i-th query of the call sees the key at position j when ⌊j / key_block⌋ is one of
    blocks[row, head, ⌊i / query_block⌋]. Causality is `Causal() & BlockSparse(...)`. They may be
    traced: kernels that go by tiles visit those alone, forward and backward.

    Attributes:
      blocks: int, broadcastable to [*B, N, nq, k]: for each of nq = ⌈T / query_block⌉ blocks of
        queries, in their order as given, the indices of k ≤ 128 blocks of keys. A negative index
        chooses nothing, nor does one beyond the last key, and one that comes twice counts once.
        Repeat the blocks of each key/value head for its query heads: `jnp.repeat(blocks, N // K,
        axis=-3)`.
      query_block: queries of a block; the last may have fewer.
      key_block: keys of a block, from position 0 on.

    Sources: Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs", 2025; Yuan et al.,
    "Native Sparse Attention", 2025.
    """

    blocks: Any
    query_block: int = struct.field(pytree_node=False)
    key_block: int = struct.field(pytree_node=False)

    def bind(self, dims: Dims) -> Self:
        sizes = {
            "BlockSparse.query_block": self.query_block,
            "BlockSparse.key_block": self.key_block,
        }
        checks.positive(**sizes)
        chosen = checks.integers("BlockSparse.blocks", self.blocks)
        nq = -(-dims.T // self.query_block)
        if chosen.ndim < 2 or not 1 <= chosen.shape[-1] <= MOST:
            raise ValueError(
                f"BlockSparse.blocks must have shape [*B, N, {nq}, k], of k from 1 to {MOST} "
                f"blocks of keys, got {chosen.shape}; choose fewer and larger ones, or give a "
                f"table as masks.Dense"
            )
        shapes.check_broadcasts(
            "BlockSparse.blocks", chosen.shape, (*dims.B, dims.N, nq, chosen.shape[-1]),
            "[*B, N, nq, k]",
            f"there are {nq} blocks of {self.query_block} of the {dims.T} queries; those of a "
            f"key/value head are given for its query heads by jnp.repeat(blocks, N // K, axis=-3)",
        )  # fmt: skip
        chosen = shapes.lead(_once(chosen), len(dims.logits))
        if chosen.shape[-2] > 1:
            xp: Any = np if is_static(chosen) else jnp
            *lead, nq, k = chosen.shape
            chosen = xp.broadcast_to(chosen[..., None, :], (*lead, nq, self.query_block, k))
            chosen = chosen.reshape(*lead, -1, k)[..., : dims.T, :]
        return self.replace(
            blocks=tuple(ScoreArray(chosen[..., c : c + 1]) for c in range(chosen.shape[-1]))
        )

    def allowed(self, at: At) -> Array:
        block = at.k // self.key_block
        return functools.reduce(operator.or_, (block == x.array for x in self.blocks))

    def tiles(self, tiles: Tiles) -> Array:
        first, last = (x[..., None, :] // self.key_block for x in (tiles.k_min, tiles.k_max))
        count: Any = 0
        for x in self.blocks:
            # Of queries for whom the same is chosen, one: shards of a call are of equal lengths.
            step = math.gcd(self.query_block, tiles.block_q, x.array.shape[-2])
            chosen = blocks(x.array[..., ::step, :], -2, tiles.block_q // step)
            count = count + ((chosen >= first) & (chosen <= last)).astype(np.int32)
        return tile_state((count > 0).any(-2), (count > last - first).all(-2))

    def block_shape(self) -> tuple[int, int]:
        return self.query_block, self.key_block


# The name in 0.3.
Chosen = BlockSparse


def top_blocks(
    scores: Array, count: int, *, query_block: int, key_block: int, causal: bool = True,
    positions: Array | None = None, visible: Array | None = None,
) -> Mask:  # fmt: skip
    """Choose for each block of queries the `count` blocks of keys with the highest scores.

    Causal, a block of queries has its own blocks, those of its own positions, whatever their scores
    are; and the others among those that end before its first query. So no query is told of later
    keys by what is chosen, as long as its scores tell nothing of later queries.

    Args:
      scores: floating [*B, N|1, nq, nk], of each block of queries with each block of keys. Of −∞ a
        block is not chosen. They take no gradient.
      count: how many to choose, the own ones among them; where there are fewer, all.
      query_block: queries of a block.
      key_block: keys of a block, from position 0 on.
      causal: True if a query sees no later key.
      positions: int [nq] or [*B, nq], where the blocks of queries begin (default: one after the
        other from 0 on).
      visible: bool, broadcastable to the scores: False for a block of keys that another mask hides
        from all queries of a block. It is not chosen, even as an own one (default: all True).

    Returns:
      `Causal() & BlockSparse(...)`, or without causality `BlockSparse(...)`.

    Raises:
      ValueError, TypeError: if the scores have no such shape or dtype, or count can't hold the
        own blocks.
    """
    checks.floating("scores", scores)
    if scores.ndim < 2 or not scores.shape[-1]:
        raise ValueError(
            f"scores must have shape [*B, N, nq, nk], got {scores.shape}; score each block of "
            f"queries with each block of keys, at least one"
        )
    checks.positive(count=count, query_block=query_block, key_block=key_block)
    checks.flag("causal", causal)
    scores = jax.lax.stop_gradient(jnp.asarray(scores))
    nq, nk = scores.shape[-2:]
    if causal:
        _check_count(count, query_block, key_block, positions is None)
        if positions is None:
            positions = np.arange(nq, dtype=np.int32) * query_block
        at = shapes.per_token("positions", positions, (*scores.shape[:-3], nq), "nq")
        at = shapes.lead(at[..., None, :, None], scores.ndim)
        first, last = at // key_block, (at + query_block - 1) // key_block
        block = shapes.lead(np.arange(nk, dtype=np.int32), scores.ndim)
        # Infinity and NaN come after the own ones.
        most = jnp.finfo(scores.dtype).max
        scores = jnp.where(scores < most, scores, most)
        scores = jnp.where(block < first, scores, -jnp.inf)
        scores = jnp.where((block >= first) & (block <= last), jnp.inf, scores)
    if visible is not None:
        visible = checks.array("visible", visible)
        remedy = "say of each block of queries which blocks of keys any of them may see"
        shapes.check_broadcasts("visible", visible.shape, scores.shape, "the scores", remedy)
        scores = jnp.where(shapes.lead(visible, scores.ndim), scores, -jnp.inf)
    best, chosen = _best(scores, min(count, nk), query_block)
    mask = BlockSparse(jnp.where(best == -jnp.inf, -1, chosen), query_block, key_block)
    return Causal() & mask if causal else mask


def _check_count(count: int, query_block: int, key_block: int, consecutive: bool) -> None:
    """Check that `count` blocks hold all in which a block of queries stands."""
    if consecutive and not (query_block % key_block and key_block % query_block):
        least = -(-query_block // key_block)
    else:
        least = (query_block + key_block - 2) // key_block + 1
    if count < least:
        raise ValueError(
            f"count must be at least {least}, the blocks of {key_block} keys that {query_block} "
            f"queries can be in, got {count}; choose more, or take smaller blocks of queries"
        )


def _best(scores: jax.Array, count: int, query_block: int) -> tuple[jax.Array, jax.Array]:
    """Return the highest scores of each row [*B, N|1, nq, nk], and where they are.

    On each device of its own rows: XLA would bring those of all devices together.
    """
    # Blocks of queries need not be divided as queries are.
    axes = ("batch", "heads", "length" if query_block == 1 else None, None)
    names = tuple(
        None if n == 1 else x for n, x in zip(scores.shape[-4:], axes[-scores.ndim :], strict=False)
    )
    out = ((*scores.shape[:-1], count), names)
    best, where = sharding.local(
        lambda scores: list(jax.lax.top_k(scores, count)), [names], [out, out], scores
    )
    return best, where


def _once(chosen: Array) -> Array:
    """Return indices of blocks, with NOWHERE for those that choose nothing more."""
    xp: Any = np if is_static(chosen) else jnp
    chosen = xp.sort(chosen, axis=-1)
    before = xp.concatenate([xp.full_like(chosen[..., :1], NOWHERE), chosen[..., :-1]], axis=-1)
    return xp.where((chosen == before) | (chosen < 0), NOWHERE, chosen)
