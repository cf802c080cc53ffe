"""Differential attention: the difference of two maps of weights."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from flax_mha import sharding
from flax_mha.base import shapes
from flax_mha.layer import core
from flax_mha.layer.core import Output
from flax_mha.layer.parameters import ArrayEntry, NormEntry, Table
from flax_mha.layer.qk_norm import QKNorm
from flax_mha.layer.settings import Call
from flax_mha.linen import MultiHeadAttention
from flax_mha.variants import common

# The vectors of λ, in the order of its equation.
_LAMBDA = ("lambda_a1", "lambda_b1", "lambda_a2", "lambda_b2")


class DifferentialAttention(MultiHeadAttention):
    """Self-attention by the difference of two softmax maps, each head with two queries and keys.

        out = (1 − λ₀) · norm((softmax(q₁ k₁ᵀ / √H) − λ softmax(q₂ k₂ᵀ / √H)) v) W_o
        λ = exp(a₁·b₁) − exp(a₂·b₂) + λ₀

    with 2·H features of v in each head, an RMSNorm over them, and learned a, b [H]. Each head has
    two maps, so use half as many heads. There is no cross-attention, `v_head_dim`, `qk_norm`,
    `normalize_qk`, `gate`, `sinks`, `exclusive`, `attention_fn` or learned `scale`. Scores and
    weights have 2·N heads: for each key/value head all of the first map, then all of the second. A
    cache holds the values with each of a head's two keys, so that a step neither copies nor sends
    them.

    Attributes:
      offset: λ₀, the initial λ. The paper has 0.8 − 0.6·exp(−0.3·l) in layer l = 0, 1, ….
      norm_epsilon: the epsilon of the norm.

    Source: Ye et al., "Differential Transformer", 2024.
    """

    _: dataclasses.KW_ONLY
    offset: float = 0.8
    norm_epsilon: float = 1e-5

    @nn.nowrap
    def compute(self, p: Any, x_q: Any, x_k: Any, x_v: Any, call: Call, cache: Any) -> Output:
        """Compute the layer."""
        common.check_inputs("differential attention", x_k, cache)
        K = self.num_kv_heads or self.num_heads
        heads = core.project_heads(p, self, x_q, None, None, call, cache)
        v = sharding.auto(functools.partial(_of_both, K), sharding.KV_HEADS, heads.v)

        a1, b1, a2, b2 = (p[name].astype(jnp.float32) for name in _LAMBDA)
        weight = jnp.exp(jnp.vdot(a1, b1)) - jnp.exp(jnp.vdot(a2, b2)) + self.offset

        def change(out: jax.Array) -> jax.Array:
            difference = functools.partial(_difference, K)
            out = p["norm"](sharding.auto(difference, sharding.HEADS, out, weight))
            return out * jnp.asarray(1 - self.offset, out.dtype)

        attention = functools.partial(common.attend, change)
        heads, call = heads._replace(v=v), dataclasses.replace(call, attention=attention)
        return core.attend(p, self, heads, call, cache)._replace(kv=None)

    @property
    def score_heads(self) -> int:
        """The number of heads of scores and weights: two maps for each head."""
        return 2 * self.num_heads

    @nn.nowrap
    def check_fields(self) -> None:
        """Check the fields."""
        super().check_fields()
        absent = (
            "v_head_dim", "qk_norm", "normalize_qk", "gate", "sinks", "exclusive", "attention_fn",
        )  # fmt: skip
        common.check("differential attention", self, absent)

    @nn.nowrap
    def table(self, D: int, Dk: int, Dv: int) -> Table:
        """Return the parameters."""
        N, K, H, _ = self.sizes(D)
        # Values of 2·H are two heads of H, so that they share a product with queries and keys.
        entries: Table = {
            "query": self.to_heads("query", D, (2 * N, H)),
            "key": self.to_heads("key", D, (2 * K, H), "kv_heads"),
            "value": self.to_heads("value", D, (2 * K, H), "kv_heads"),
        }
        vectors = ArrayEntry((H,), (None,), nn.initializers.normal(0.1))
        entries |= self.out_table(N, 2 * H, D)
        entries |= dict.fromkeys(_LAMBDA, vectors)
        return entries | {"norm": NormEntry((2 * H,), QKNorm(epsilon=self.norm_epsilon))}

    @nn.nowrap
    def sizes(self, features: int) -> tuple[int, int, int, int]:
        """Return N, K, H and Hv of one map."""
        return shapes.head_sizes(
            features, self.num_heads, self.num_kv_heads, self.qkv_features,
            self.head_dim or (self.qkv_features or features) // (2 * self.num_heads), None,
        )  # fmt: skip


def _of_both(K: int, v: jax.Array) -> jax.Array:
    """Repeat values [*B, T, 2·K, H] as 2·H features for both maps of each head."""
    *tokens, heads, H = v.shape
    size = heads // K * H
    return jnp.repeat(v.reshape(*tokens, K, 1, size), 2, -2).reshape(*tokens, heads, size)


def _difference(K: int, out: jax.Array, weight: jax.Array) -> jax.Array:
    """Subtract the second map, times a weight, from the first: 2·N heads in, N out."""
    *rows, heads, features = out.shape
    maps = out.astype(shapes.wide(out.dtype)).reshape(*rows, K, 2, heads // (2 * K), features)
    left = maps[..., 0, :, :] - weight * maps[..., 1, :, :]
    return left.astype(out.dtype).reshape(*rows, heads // 2, features)
