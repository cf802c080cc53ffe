"""Differential attention: what two maps of weights have in common cancels."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from flax_mha import sharding
from flax_mha.base import checks, shapes
from flax_mha.layer import core
from flax_mha.layer.settings import Call, Settings
from flax_mha.linen import MultiHeadAttention
from flax_mha.variants import common


class DifferentialAttention(MultiHeadAttention):
    """Self-attention by the difference of two softmax maps, each head with two queries and keys.

        out = (1 − λ₀) · norm((softmax(q₁ k₁ᵀ / √H) − λ softmax(q₂ k₂ᵀ / √H)) v) W_o
        λ = exp(a₁·b₁) − exp(a₂·b₂) + λ₀

    with v of 2·H features a head, an RMSNorm of its own scale over them, and learned a, b [H]. As
    each head has two maps, `num_heads` is half of what other layers of that size have. Fields and
    arguments are those of `MultiHeadAttention`, but that there is no cross-attention, no
    `v_head_dim`, `qk_norm`, `normalize_qk`, `gate`, `sinks` or `attention_fn`, and `scale` is a
    number. Weights that are returned or captured are those of both maps, 2·N heads: of each
    key/value head first all of the first map, then of the second. A cache holds the values of a
    head with each of its two keys, so that a step neither copies them nor sends them between
    devices: 6·H numbers a token and key/value head.

    Attributes:
      offset: λ₀; the paper has 0.8 − 0.6·exp(−0.3·l) in layer l, from 0 on.
      norm_epsilon: of the norm.

    Source: Ye et al., "Differential Transformer", 2024.
    """

    offset: float = 0.8
    norm_epsilon: float = 1e-5

    @nn.nowrap
    def compute(
        self, x_q: jax.Array, x_k: jax.Array | None, x_v: jax.Array | None,
        settings: Settings, call: Call, cache: core.Held,
    ) -> core.Output:  # fmt: skip
        self._check(x_q, x_k, x_v)
        D = x_q.shape[-1]
        N, K, H, _ = self.sizes(D)
        # Values of 2·H as two heads of H, so that one product gives them with queries and keys.
        query, key, value = (
            self.linear(name, (D,), ("embed", names, "head_dim"), (2 * n, H))
            for name, names, n in (
                ("query", "heads", N), ("key", "kv_heads", K), ("value", "kv_heads", K)
            )
        )  # fmt: skip
        out = self._out((N, 2 * H), D) if self.project_out else None
        weights = core.Weights(query, key, value, out)
        heads = core.projected(weights, settings, x_q, x_q, x_q, call, cache)
        v = sharding.auto(functools.partial(_of_both, K), sharding.KV_HEADS, heads.v)
        attention = functools.partial(_attend, self._lambda(H), self._norm(2 * H), K)
        heads, call = heads._replace(v=v), dataclasses.replace(call, attention=attention)
        return core.attend(weights, settings, heads, call, cache)._replace(kv=None)

    @nn.nowrap
    def sizes(self, features: int) -> tuple[int, int, int, int]:
        """N, K, H and Hv, of one map."""
        return shapes.head_sizes(
            features, self.num_heads, self.num_kv_heads, self.qkv_features,
            self.head_dim or (self.qkv_features or features) // (2 * self.num_heads), None,
        )  # fmt: skip

    @nn.nowrap
    def _lambda(self, H: int) -> jax.Array:
        """λ, float32."""
        init = nn.initializers.normal(0.1)
        names = [f"lambda_{x}{n}" for n in (1, 2) for x in "ab"]
        a1, b1, a2, b2 = (
            self.param(name, init, (H,), self.param_dtype).astype(jnp.float32) for name in names
        )
        return jnp.exp(jnp.vdot(a1, b1)) - jnp.exp(jnp.vdot(a2, b2)) + self.offset

    @nn.nowrap
    def _norm(self, features: int) -> Any:
        """The norm of a head's output, and the factor 1 − λ₀."""
        norm = nn.RMSNorm(self.norm_epsilon, self.dtype, self.param_dtype, name="norm")
        return lambda x: norm(x) * jnp.asarray(1 - self.offset, x.dtype)

    @nn.nowrap
    def _check(self, x_q: jax.Array, x_k: jax.Array | None, x_v: jax.Array | None) -> None:
        checks.number("offset", self.offset)
        common.check_inputs("differential attention", x_q, x_k, x_v)
        absent = ("v_head_dim", "qk_norm", "normalize_qk", "gate", "sinks", "attention_fn")
        common.check("differential attention", self, absent)


def _of_both(K: int, v: jax.Array) -> jax.Array:
    """Return values [*B, T, 2·K, H] as those of 2·H that each map of a head has."""
    whole = v.reshape(*v.shape[:-2], K, 1, -1)
    return jnp.repeat(whole, 2, -2).reshape(*v.shape[:-1], -1)


def _attend(weight: jax.Array, norm: Any, K: int, q: jax.Array, k: Any, v: Any, **call: Any) -> Any:
    """Attention by both maps, and their difference: 2·N heads in, N out."""

    def difference(out: jax.Array, weight: jax.Array) -> jax.Array:
        *rows, heads, features = out.shape
        maps = out.reshape(*rows, K, 2, heads // (2 * K), features)
        left = maps[..., 0, :, :] - weight.astype(out.dtype) * maps[..., 1, :, :]
        return left.reshape(*rows, heads // 2, features)

    def normed(out: jax.Array) -> jax.Array:
        return norm(sharding.auto(difference, sharding.HEADS, out, weight))

    return common.attend(normed, q, k, v, **call)
