"""Attention to the blocks of keys that each query chooses."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from flax_mha import core, inputs, masks, shapes, sharding
from flax_mha.attention import MultiHeadAttention
from flax_mha.cache import CacheConfig, KVCache
from flax_mha.call import Call, Settings
from flax_mha.kernels import dot_product_attention
from flax_mha.kernels.stored import widened
from flax_mha.variants import common


class ChosenBlocksAttention(MultiHeadAttention):
    """Causal self-attention of each query to a few blocks of keys, which it chooses by their means.

        score of block c = q · mean of the keys of block c
        out = attention to the query's own block, and the `count` − 1 before it of the highest score

    There are no parameters beyond those of `MultiHeadAttention`: what is chosen takes no gradient,
    and queries learn to find a block as they learn to find keys in it. Fields and arguments are
    those of that layer, but that there is no cross-attention, `order`, `attention_fn` or cache with
    a window. Queries that stand together are computed together, so that time is saved where they
    choose alike, as those of one `query_block` do.

    Attributes:
      block: keys of a block.
      count: how many blocks a query sees, its own among them.
      share: whether the query heads of each key/value head choose together, by the sum of their
        softmaxes over the scores; else each head for itself.
      query_block: how many queries choose together, by the first of them: by a later one the others
        would be told of what comes after them. Decoding has 1.

    Sources: Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs", 2025; with `share`
    as in the selection of Yuan et al., "Native Sparse Attention", 2025.
    """

    block: int = 64
    count: int = 8
    share: bool = False
    query_block: int = 1

    def compute(
        self, x_q: jax.Array, x_k: jax.Array | None, x_v: jax.Array | None,
        settings: Settings, call: Call, cache: core.Held,
    ) -> core.Output:  # fmt: skip
        """See `MultiHeadAttention.compute`."""
        self._check(x_q, x_k, x_v, call, cache)
        call = dataclasses.replace(call, attention=self._attend)
        return super().compute(x_q, x_k, x_v, settings, call, cache)

    def _attend(self, q: jax.Array, k: Any, v: Any, **call: Any) -> Any:
        """`dot_product_attention` to what is chosen."""
        at = call.get("q_positions")
        at = jnp.arange(q.shape[-3], dtype=jnp.int32) if at is None else jnp.asarray(at)
        names = ("batch", "heads", "length", None)
        scores = sharding.auto(self._scores, names, q, widened(k), at)
        chosen = masks.top_blocks(
            scores, self.count, query_block=self.query_block, key_block=self.block,
            positions=at[..., :: self.query_block],
        )  # fmt: skip
        call["mask"] = masks.combine(chosen, call.get("mask"))
        return dot_product_attention(q, k, v, **call)

    def _scores(self, q: jax.Array, k: jax.Array, at: jax.Array) -> jax.Array:
        """Of each block of queries with each block of keys, [*B, N, nq, nk]."""
        q, k = jax.lax.stop_gradient((q[..., :: self.query_block, :, :], k))
        *B, T, N, H = q.shape
        S, K = k.shape[-3:-1]
        k = jnp.pad(k, (*((0, 0) for _ in B), (0, -S % self.block), (0, 0), (0, 0)))
        means = k.reshape(*B, -1, self.block, K, H).mean(-3, dtype=shapes.wide(q.dtype))
        q = q.reshape(*B, T, K, N // K, H).astype(means.dtype)
        scores = jnp.einsum("...tkgh,...ckh->...kgtc", q, means)
        if self.share:
            given = None if isinstance(self.scale, str) else self.scale
            scores = scores * (H**-0.5 if given is None else given)
            first = shapes.lead(at[..., None, None, :: self.query_block, None], scores.ndim)
            ends = shapes.lead(jnp.arange(1, means.shape[-3] + 1) * self.block, scores.ndim)
            scores = jax.nn.softmax(scores, where=ends <= first).sum(-3, keepdims=True)
            scores = jnp.broadcast_to(scores, (*scores.shape[:-3], N // K, *scores.shape[-2:]))
        return scores.reshape(*B, N, T, -1)

    def _check(
        self, x_q: jax.Array, x_k: jax.Array | None, x_v: jax.Array | None, call: Call,
        cache: core.Held,
    ) -> None:  # fmt: skip
        inputs.positive(block=self.block, count=self.count, query_block=self.query_block)
        common.check_inputs("attention to chosen blocks", x_q, x_k, x_v)
        if self.share and isinstance(self.scale, str):
            raise ValueError(f"share has a number for scale, got {self.scale!r}; give one")
        if call.order is not None:
            raise ValueError("blocks of keys are those of one order, got order; leave it out")
        if self.attention_fn is not None:
            raise ValueError("blocks are chosen for our kernels, got attention_fn; leave it out")
        if isinstance(cache, KVCache | CacheConfig):
            if self.query_block > 1:
                raise ValueError(
                    f"decoding chooses for each token, got query_block={self.query_block}; give 1"
                )
            ring = cache.slots if isinstance(cache, CacheConfig) else cache.window
            if ring is not None:
                raise ValueError(
                    "in a ring buffer blocks of slots are not blocks of keys, got a cache with "
                    "slots or a window; leave them out"
                )
