"""Attention to the blocks of keys that each query chooses."""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from flax_mha import masks, sharding
from flax_mha.base import checks, loops, shapes, symbols
from flax_mha.base.coordinates import Array, At, tiles_of, whole
from flax_mha.cache.resolve import appends
from flax_mha.kernels import dot_product_attention
from flax_mha.kernels.call.stored import dequantize
from flax_mha.layer.core import Output
from flax_mha.layer.settings import Call
from flax_mha.linen import MultiHeadAttention
from flax_mha.masks.algebra import resolve
from flax_mha.masks.states import is_static
from flax_mha.variants import common

# The scores of single keys in memory at a time: 8 MiB in float32.
_SCORES = 2**21


class ChosenBlocksAttention(MultiHeadAttention):
    """Causal self-attention of each query to a few blocks of keys, chosen by their means.

        score of block c = q · mean of the keys of block c that the mask lets it see
        out = attention to the query's own block, and the `count` − 1 before it of the highest score

    A query never chooses a fully masked block. There is no cross-attention, `order`, `attention_fn`
    or cache with a window. The choice has no gradient. It is faster if neighboring queries choose
    the same blocks.

    Attributes:
      block: the number of keys in a block.
      count: the number of blocks that a query sees, its own block included.
      query_block: the number of queries that choose together, by the first of their tokens that any
        of them sees. Means are over the keys that any of them sees. Decoding needs 1.

    Source: Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs", 2025.
    """

    _: dataclasses.KW_ONLY
    block: int = 64
    count: int = 8
    query_block: int = 1

    @nn.nowrap
    def compute(self, p: Any, x_q: Any, x_k: Any, x_v: Any, call: Call, cache: Any) -> Output:
        """Compute the layer."""
        common.check_inputs("attention to chosen blocks", x_k, cache)
        if call.order is not None:
            raise ValueError(
                "order cannot be used with chosen blocks, which hold consecutive keys; leave it out"
            )
        if appends(cache) and self.query_block > 1:
            raise ValueError(
                f"decoding chooses for each token, got query_block={self.query_block}; give 1"
            )
        if appends(cache) and self.cache is not None and self.cache.slots is not None:
            raise ValueError(
                "in a ring buffer blocks of slots are not blocks of keys, got a cache with slots; "
                "leave them out"
            )
        call = dataclasses.replace(call, attention=self._attend)
        return super().compute(p, x_q, x_k, x_v, call, cache)

    @nn.nowrap
    def check_fields(self) -> None:
        """Check the fields."""
        super().check_fields()
        checks.positive(block=self.block, count=self.count, query_block=self.query_block)
        common.check("attention to chosen blocks", self, ("attention_fn",), learns_scale=True)

    @nn.nowrap
    def _attend(self, q: jax.Array, k: Any, v: Any, **call: Any) -> Any:
        at = call.get("q_positions")
        mask = masks.combine(masks.Causal(), call.get("mask"))
        if not (q.size and k.shape[-3]):
            return dot_product_attention(q, k, v, **call | {"mask": mask})
        # Blocks of queries need not be sharded as queries are.
        names = ("batch", "heads", "length" if self.query_block == 1 else None, None)
        scores, visible = sharding.auto(self._scores, [names, names], q, dequantize(k), at, mask)
        at = jnp.arange(q.shape[-3], dtype=jnp.int32) if at is None else jnp.asarray(at)
        chosen = masks.top_blocks(
            scores, self.count, query_block=self.query_block, key_block=self.block,
            positions=at[..., :: self.query_block], visible=visible,
        )  # fmt: skip
        call["mask"] = masks.combine(chosen, call.get("mask"))
        return dot_product_attention(q, k, v, **call)

    @nn.nowrap
    def _scores(
        self, q: jax.Array, k: jax.Array, positions: Array | None, mask: masks.Mask
    ) -> list[jax.Array]:
        """Return scores of past blocks [*B, N, nq, nk], and a mask of the visible ones."""
        q, k = jax.lax.stop_gradient((q, k.astype(shapes.wide(q.dtype))))
        dims = shapes.Dims.of(q, k, k)
        at = whole(dims, positions)
        mask = resolve(mask.bind(dims), at)
        tiles = tiles_of(at.q, at.k, self.query_block, self.block)
        verdict = mask.tiles(tiles)
        past = tiles.k_max < at.q[..., :: self.query_block, :]
        q = self._choosing(q, mask, at).astype(k.dtype)
        if is_static(verdict, past) and not (past & (verdict == masks.PARTIAL)).any():
            # The means of whole blocks.
            (*B, nq, N, H), K = q.shape, k.shape[-2]
            means = self._sums(jnp.moveaxis(k, -3, -1)) / self.block
            scores = jnp.einsum("...tkgh,...khc->...kgtc", q.reshape(*B, nq, K, N // K, H), means)
            scores, visible = scores.reshape(*B, N, nq, -1), jnp.asarray(verdict > masks.EMPTY)
        else:
            scores, visible = self._by_visible_keys(q, k, mask, at)
        visible = jnp.broadcast_to(shapes.lead(visible, scores.ndim), scores.shape)
        return [scores, visible]

    @nn.nowrap
    def _choosing(self, q: jax.Array, mask: masks.Mask, at: At) -> jax.Array:
        """Return the query that chooses for each block of queries, [*B, nq, N, H]."""
        size = self.query_block
        if size == 1:
            return q

        def choose(start: jax.Array) -> jax.Array:
            index = start + jnp.arange(size)
            return start + common.allowed(mask, at, index, index).any(-2).argmax(-1)

        index = jax.vmap(choose, out_axes=-2)(jnp.arange(0, q.shape[-3], size))
        return jnp.take_along_axis(q, index[..., None], -3)

    @nn.nowrap
    def _by_visible_keys(
        self, q: jax.Array, k: jax.Array, mask: masks.Mask, at: At
    ) -> tuple[jax.Array, jax.Array]:
        """Return scores of the means of visible keys, and a mask of blocks that have any."""
        *B, nq, N, H = q.shape
        S, K = k.shape[-3:-1]

        def score(start: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
            allowed = common.allowed(mask, at, start + jnp.arange(self.query_block))
            seen = jnp.broadcast_to(allowed.any(-2), (*B, N, S))
            s = jnp.einsum("...kgh,...skh->...kgs", q.reshape(*B, K, N // K, H), k)
            s = jnp.where(seen, s.reshape(*B, N, S), 0.0)
            count = self._sums(seen.astype(s.dtype))
            return self._sums(s) / jnp.maximum(count, 1.0), count > 0

        starts = jnp.arange(0, at.q.shape[-2], self.query_block)
        together = None  # One by one, if sizes are symbolic.
        if not symbols.is_symbolic(*B, S, nq):
            together = min(nq, max(1, _SCORES // max(1, math.prod(B) * N * S)))
        each = starts, jnp.moveaxis(q, -3, 0)
        results = loops.map_blocks(lambda x: score(*x), each, (k, mask, at), together)
        scores, visible = (jnp.moveaxis(x, 0, -2) for x in results)
        return scores, visible

    @nn.nowrap
    def _sums(self, x: jax.Array) -> jax.Array:
        """Sum x [..., S] over each block of keys: [..., nk]."""
        S, nk = x.shape[-1], -(-x.shape[-1] // self.block)
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, nk * self.block - S)])
        return x.reshape(*x.shape[:-1], nk, self.block).sum(-1)
