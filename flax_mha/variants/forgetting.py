"""Forgetting attention: each token has a learned gate on the scores of earlier tokens."""

import dataclasses
import functools
from typing import Any, Self, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from flax_mha import masks, sharding
from flax_mha.base import shapes
from flax_mha.base.coordinates import Array, At, ScoreArray
from flax_mha.base.shapes import Dims
from flax_mha.cache import KVCache
from flax_mha.kernels import dot_product_attention
from flax_mha.kernels.call.stored import Stored, read
from flax_mha.layer import core
from flax_mha.layer.core import Output
from flax_mha.layer.parameters import ArrayEntry, LinearEntry, Table
from flax_mha.layer.settings import ZEROS, Call
from flax_mha.linen import MultiHeadAttention
from flax_mha.scores.score_mod import ScoreMod, without_vectors
from flax_mha.sharding.prefix_sums import prefix_sums
from flax_mha.variants import common

# A cache keeps a sum in parts of 8 significant bits: 3 of its float32 value, 2 of the remainder.
# These dtypes hold a part.
PARTS = (3, 2)
_EXACT = (jnp.bfloat16, jnp.float32, jnp.float64)
_OF_TOKENS = ("batch", "length", "heads")
# A float32 sum, and its rounding error.
_Pair: TypeAlias = tuple[jax.Array, jax.Array]


class ForgettingAttention(MultiHeadAttention):
    """Causal self-attention whose tokens have gates on the scores of earlier tokens.

        f_t = σ(x_t W_f + b_f),    c_t = Σ_{l ≤ t} log f_l             of each head
        out = softmax(q kᵀ / √H + c_i − c_j, over j ≤ i) v W_o

    with W_f [D, N], `forget_gate`, and b_f [N], `forget_bias`, whatever `use_bias` is. It needs no
    positions. A token that the mask hides from itself, such as padding, has f = 1. NaN in a token
    reaches all later outputs, unless it is padding by `lengths`. There is no cross-attention,
    `attention_fn`, or score that reads queries and keys. The rounding error of c is kept too, so
    that c_i − c_j keeps its digits at any length. A cache stores 40 bits of c in 5·N/K extra
    features of each key; its dtype is bfloat16, float32 or float64.

    Source: Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate", 2025.
    """

    @nn.nowrap
    def compute(self, p: Any, x_q: Any, x_k: Any, x_v: Any, call: Call, cache: Any) -> Output:
        """Compute the layer."""
        without_vectors("forgetting attention", call.scores)
        common.check_inputs("forgetting attention", x_k, cache)
        heads = core.project_heads(p, self, x_q, None, None, call, cache)
        z, q, k, order = p["forget_gate"](heads.x), heads.q, heads.k, heads.order
        dims, positions, last = Dims.of(q, k, heads.v), order, None
        has_slots = isinstance(cache, KVCache)
        if has_slots:
            dims, positions = dims._replace(S=cache.slots), cache.next_positions(dims.T)
            names = ("batch", None, "heads")
            last = sharding.auto(_last, (names, names), read(cache.key), cache.length, z)
        if cache is not None:
            dtype = jnp.dtype(cache.key.dtype if has_slots else cache.dtype or k.dtype)
            if dtype not in _EXACT:
                raise ValueError(
                    f"forgetting attention needs a cache that keeps all digits of its gates, got "
                    f"{dtype}; give CacheConfig(dtype='bfloat16'), or a wider one"
                )
        mask = masks.combine(self.mask, call.mask)
        of_tokens = functools.partial(_gates, dims, has_slots)
        gates = sharding.auto(of_tokens, _OF_TOKENS, z, p["forget_bias"], mask, positions)
        c = sharding.auto(_summed, (_OF_TOKENS, _OF_TOKENS), gates, order, last)
        joined = functools.partial(sharding.auto, _joined, sharding.KV_HEADS)
        heads = heads._replace(kept=lambda k, v: (joined(k, *c), v))
        call = dataclasses.replace(
            call, mask=call.mask if has_slots else masks.combine(masks.Causal(), call.mask),
            # Padded queries have more features.
            scale=q.shape[-1] ** -0.5 if self.scale is None else call.scale,
            scores=(*call.scores, _Forget(c, None if has_slots else c)),
            attention=functools.partial(_attend, c) if has_slots else call.attention,
        )  # fmt: skip
        return core.attend(p, self, heads, call, cache)._replace(kv=None)

    @nn.nowrap
    def check_fields(self) -> None:
        """Check the fields."""
        super().check_fields()
        common.check("forgetting attention", self, ("attention_fn",), learns_scale=True)

    @nn.nowrap
    def table(self, D: int, Dk: int, Dv: int) -> Table:
        """Return the parameters."""
        N = self.num_heads
        return super().table(D, Dk, Dv) | {
            "forget_gate": LinearEntry((D,), (N,), ("embed", "heads"), has_bias=False),
            "forget_bias": ArrayEntry((N,), ("heads",), ZEROS, is_random=False),
        }


class _Forget(ScoreMod):
    """score + c_i − c_j, for c of queries [*B, T, N] and of keys [*B, S, N], None in a cache."""

    q: Any
    k: Any

    def bind(self, dims: Dims) -> Self:
        q, k = jax.tree.map(lambda c: jnp.swapaxes(c, -1, -2)[..., None], (self.q, self.k))
        k = jax.tree.map(lambda c: jnp.swapaxes(c, -1, -2), k)
        return self.replace(q=jax.tree.map(ScoreArray, q), k=jax.tree.map(ScoreArray, k))

    def __call__(self, score: jax.Array, at: At) -> jax.Array:
        # Subtract the sums first: the score would lose digits next to a large one.
        sums, errors = (q.array - k.array for q, k in zip(self.q, self.k, strict=True))
        return score + (sums + errors).astype(score.dtype)


def _attend(of_q: Any, q: jax.Array, k: Stored, v: Any, **call: Any) -> Any:
    """Attend to keys of a cache, with c in their last features."""
    names = ("batch", k.slots, "kv_heads")
    of_k = sharding.auto(_kept, (names, names), read(k.values), of_q[0])
    scores = [x.replace(k=of_k) if isinstance(x, _Forget) else x for x in call.pop("scores")]
    # As many features as the keys, 0 where the keys have c.
    q = jnp.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, k.shape[-1] - q.shape[-1])])
    return dot_product_attention(q, k, v, scores=scores, **call)


def _gates(
    dims: Dims, cached: bool, z: jax.Array, bias: jax.Array, mask: masks.Mask | None,
    positions: Array | None,
) -> jax.Array:  # fmt: skip
    """Return log f [*B, T, N], 0 for hidden tokens."""
    gates = jax.nn.log_sigmoid(z.astype(jnp.float32) + shapes.lead(bias, z.ndim))
    if mask is None:
        return gates
    itself = common.sees_itself(mask, dims, positions, cached)
    is_visible = jnp.swapaxes(jnp.broadcast_to(itself, dims.logits[:-1]), -1, -2)
    return jnp.where(is_visible, gates, 0.0)


def _summed(gates: jax.Array, order: Array | None, last: _Pair | None) -> _Pair:
    """Return c [*B, T, N], the sums of log f, from c of the last earlier token on."""
    if order is not None:
        gates = jnp.take(gates, jnp.argsort(jnp.asarray(order)), -2)
    c = prefix_sums(_scan, _add, _OF_TOKENS, gates, jnp.zeros_like(gates))
    if order is not None:
        return jnp.take(c[0], order, -2), jnp.take(c[1], order, -2)
    return c if last is None else _add(last, c)


def _scan(*pair: jax.Array) -> _Pair:
    return lax.associative_scan(_add, pair, axis=pair[0].ndim - 2)


def _add(a: _Pair, b: _Pair) -> _Pair:
    """Add two sums and their rounding errors (Knuth's TwoSum, and a sum of all errors)."""
    total = a[0] + b[0]
    added = total - a[0]
    error = (a[0] - (total - added)) + (b[0] - added) + (a[1] + b[1])
    c = total + error
    return c, error - (c - total)


def _joined(k: jax.Array, c: jax.Array, error: jax.Array) -> jax.Array:
    """Join keys [*B, T, K, H] and c in parts of 8 bits: [*B, T, K, H + 5·G]."""
    parts = []
    for x, count in zip((c, error), PARTS, strict=True):
        remainder = x.reshape(*k.shape[:-1], x.shape[-1] // k.shape[-2])
        for _ in range(count):
            parts.append(lax.reduce_precision(remainder, 8, 7))
            remainder = remainder - parts[-1]
    return jnp.concatenate([k, *(x.astype(k.dtype) for x in parts)], -1)


def _kept(k: jax.Array, like: jax.Array) -> _Pair:
    """Read c [*B, S, N] from keys of a cache, for the heads of `like`."""
    *tokens, K, features = k.shape
    G, count = like.shape[-1] // K, sum(PARTS)
    parts = k[..., features - count * G :].astype(jnp.float32).reshape(*tokens, K, count, G)
    # The sums are exact, because the parts have other bits.
    sums = [x.sum(-2) for x in jnp.split(parts, PARTS[:1], -2)]
    c, error = (lax.collapse(x, x.ndim - 2) for x in sums)
    return c, error


def _last(k: jax.Array, length: jax.Array, like: jax.Array) -> _Pair:
    """Read c [*B, 1, N] of the last token from keys [*B, K, S, ·], 0 if there is none."""
    slot = (length - 1)[..., None, None, None] % k.shape[-2]
    # Without the features of k, all of which XLA for TPUs would copy.
    parts = k[..., -sum(PARTS) * (like.shape[-1] // k.shape[-3]) :]
    c, error = _kept(jnp.swapaxes(jnp.take_along_axis(parts, slot, -2), -3, -2), like)
    has_last = length[..., None, None] > 0
    return jnp.where(has_last, c, 0.0), jnp.where(has_last, error, 0.0)
