"""Multi-head latent attention: keys and values of all heads from one small vector a token."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from flax_mha import sharding
from flax_mha.base import checks
from flax_mha.cache import CacheConfig, KVCache
from flax_mha.kernels.stored import dequantize
from flax_mha.layer import core, padding
from flax_mha.layer.heads import turned
from flax_mha.layer.linear import Linear, fused
from flax_mha.layer.settings import Call, Settings
from flax_mha.linen import MultiHeadAttention
from flax_mha.scores.base import without_vectors
from flax_mha.variants import common


class MultiHeadLatentAttention(MultiHeadAttention):
    """Self-attention whose keys and values are projected from a latent c of each token.

        c = norm(x W_c),   r = rotate(x W_r)                    one for all heads
        k = [c W_k, r],    v = c W_v                            of each head
        q = [x W_q, rotate(x W_q′)],  or of norm(x W_d) in place of x
        out = softmax(q kᵀ / √(H + R)) v W_o

    with H = `head_dim` and R = `rope_dim` features. Training computes k and v. Decoding keeps c and
    r alone, `kv_rank` + R numbers a token whatever the number of heads, and never computes k and v:
    (q W_kᵀ) cᵀ is q kᵀ, and (weights · c) W_v is weights · v. Biases of k and v are rows more of
    W_k and W_v, and a 1 in c.

    All fields and arguments are those of `MultiHeadAttention`, but that there is no
    cross-attention, no `num_kv_heads`, `qk_norm`, `normalize_qk`, `gate` or `attention_fn`, and
    `scale` is a number. `qkv_features` counts N·H, without R. `rotary` must be given.

    Attributes:
      kv_rank: features of c.
      rope_dim: R, features of queries and keys that `rotary` turns.
      q_rank: features that queries are projected from; None for those of the input.
      norm_epsilon: of the norms of c and of what queries are projected from.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.
    """

    kv_rank: int = 512
    rope_dim: int = 64
    q_rank: int | None = None
    norm_epsilon: float = 1e-6

    @nn.nowrap
    def compute(
        self, x_q: jax.Array, x_k: jax.Array | None, x_v: jax.Array | None,
        settings: Settings, call: Call, cache: core.Held,
    ) -> core.Output:  # fmt: skip
        self._check(x_q, x_k, x_v)
        without_vectors("latent attention", settings.scores, call.scores)
        (N, _, H, Hv), R = self.sizes(x_q.shape[-1]), self.rope_dim
        order = core.ordered(call.order, cache is None, x_q.shape[-2])
        x, _, _ = padding.cleared_inputs(x_q, x_q, x_q, call.lengths, order)

        of_q = x
        if self.q_rank is not None:
            down = self.linear("query_down", x.shape[-1:], ("embed", None), (self.q_rank,))
            of_q = self._norm("query_norm")(down(x))
        query = self.linear("query", of_q.shape[-1:], (None, "heads", None), (N, H + R))
        q = query(of_q)
        both = ("embed", None)
        kv = self.linear("kv_down", x.shape[-1:], both, (self.kv_rank + R,))(x)
        c = self._norm("kv_norm")(kv[..., : self.kv_rank])
        q_rope, r = turned(
            settings.rotary, q[..., H:], kv[..., None, self.kv_rank :], call.positions, order, cache
        )
        names = (None, "heads", "head_dim")
        key = self.linear("key", (self.kv_rank,), names, (N, H))
        value = self.linear("value", (self.kv_rank,), names, (N, Hv))
        weights = core.Weights(
            query, key, value,
            self._out((N, Hv), x.shape[-1]) if self.project_out else None,
            sinks=self._of_heads("sinks", nn.initializers.zeros_init()) if self.sinks else None,
        )  # fmt: skip
        if settings.scale is None:
            settings = dataclasses.replace(settings, scale=(H + R) ** -0.5)
        latent = c[..., None, :]
        if isinstance(cache, KVCache):
            absorbed = functools.partial(_absorbed, q[..., :H], key, value)
            call = dataclasses.replace(call, attention=absorbed)
            kept = core.Projected(q_rope, r, latent)
            return core.attend(weights, settings, kept, call, cache)._replace(kv=None)
        k, v = fused(c, (key, value))
        q, k = _joined(q[..., :H], q_rope), _joined(k, r)
        heads = core.Projected(q, k, v, order=order)
        found = core.attend(weights, settings, heads, call, None)
        made = cache.empty(r, latent, self.mask) if isinstance(cache, CacheConfig) else None
        return found._replace(cache=made, kv=None)

    @nn.nowrap
    def _norm(self, name: str) -> nn.Module:
        return nn.RMSNorm(self.norm_epsilon, self.dtype, self.param_dtype, name=name)

    @nn.nowrap
    def _check(self, x_q: jax.Array, x_k: jax.Array | None, x_v: jax.Array | None) -> None:
        checks.positive(kv_rank=self.kv_rank, rope_dim=self.rope_dim)
        checks.optional(q_rank=self.q_rank)
        common.check_inputs("latent attention", x_q, x_k, x_v)
        if self.rotary is None:
            raise ValueError("latent attention needs rotary, got None; give positions.Rotary()")
        absent = ("num_kv_heads", "qk_norm", "normalize_qk", "gate", "attention_fn")
        common.check("latent attention", self, absent)


def _absorbed(
    q: jax.Array, key: Linear, value: Linear, q_rope: jax.Array, r: Any, c: Any, **call: Any
) -> Any:
    """Attention to latents as they are kept: keys [c, r] and values c, of one head for all."""
    r, c = dequantize(r), dequantize(c)
    q = _product("...tnh,rnh->...tnr", key, q)
    k, v = (_with_bias(linear, c).astype(q.dtype) for linear in (key, value))
    q, k = _joined(q, q_rope), jnp.concatenate([k, r.astype(q.dtype)], -1)
    of_heads = functools.partial(_product, "...tnr,rnh->...tnh", value)
    return common.attend(of_heads, q, k, v, **call)


def _with_bias(linear: Linear, c: jax.Array) -> jax.Array:
    """Latents [*B, S, 1, rank] with a 1 after each, if the map from them has a bias."""
    return c if linear.bias is None else jnp.concatenate([c, jnp.ones_like(c[..., :1])], -1)


def _product(sums: str, linear: Linear, x: jax.Array) -> jax.Array:
    """The product with a kernel [rank, N, ·] that has the bias, if there is one, as a row more."""

    def product(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        kernel = kernel if bias is None else jnp.concatenate([kernel, bias[None]])
        return jnp.einsum(sums, x, kernel.astype(x.dtype), precision=linear.precision)

    return sharding.auto(product, sharding.HEADS, x, linear.kernel, linear.bias)


def _joined(x: jax.Array, rotated: jax.Array) -> jax.Array:
    """Features of heads [*B, T, N, ·] with those that are turned, [*B, T, N|1, R]."""

    def join(x: jax.Array, rotated: jax.Array) -> jax.Array:
        rotated = jnp.broadcast_to(rotated, (*x.shape[:-1], rotated.shape[-1]))
        return jnp.concatenate([x, rotated], -1)

    return sharding.auto(join, sharding.HEADS, x, rotated)
