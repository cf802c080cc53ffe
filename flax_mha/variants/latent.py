"""Multi-head latent attention: keys and values of all heads from one small vector a token."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from flax_mha import sharding
from flax_mha.base import checks, shapes, symbols
from flax_mha.base.shapes import Shape
from flax_mha.cache import KVCache
from flax_mha.kernels.call.stored import Stored, dequantize
from flax_mha.layer import core, padding
from flax_mha.layer.core import Output
from flax_mha.layer.heads import turn, turn_positions
from flax_mha.layer.linear import Linear
from flax_mha.layer.parameters import LinearEntry, NormEntry, Table
from flax_mha.layer.qk_norm import QKNorm
from flax_mha.layer.settings import Call, has_bias
from flax_mha.linen import MultiHeadAttention
from flax_mha.scores.score_mod import without_vectors
from flax_mha.variants import common


class MultiHeadLatentAttention(MultiHeadAttention):
    """Self-attention whose keys and values are projections of a latent c of each token.

        c = norm(x W_c),   r = rotate(x W_r)                    one for all heads
        k = [c W_k, r],    v = c W_v                            of each head
        q = [x W_q, rotate(x W_q′)],  or of norm(x W_d) in place of x
        out = softmax(q kᵀ / √(H + R)) v W_o

    with H = `head_dim` and R = `rope_dim` features. Training computes k and v. Decoding keeps only
    c and r, `kv_rank` + R numbers for each token, and computes neither k nor v: (q W_kᵀ) cᵀ is
    q kᵀ, and (weights · c) W_v is weights · v.

    `rotary` is required, and `qkv_features` is N·H without R. There is no cross-attention,
    `num_kv_heads`, `qk_norm`, `normalize_qk`, `gate`, `exclusive`, `attention_fn` or learned
    `scale`.

    Attributes:
      kv_rank: the features of c.
      rope_dim: the features of queries and keys that `rotary` rotates, R.
      q_rank: the features of x W_d; None to project queries from x.
      norm_epsilon: the epsilon of the norms.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.
    """

    _: dataclasses.KW_ONLY
    kv_rank: int = 512
    rope_dim: int = 64
    q_rank: int | None = None
    norm_epsilon: float = 1e-6

    @nn.nowrap
    def compute(self, p: Any, x_q: Any, x_k: Any, x_v: Any, call: Call, cache: Any) -> Output:
        """Compute the layer."""
        common.check_inputs("latent attention", x_k, cache)
        without_vectors("latent attention", call.scores)
        order = core.check_order(call.order, cache is None, x_q.shape[-2])
        x = padding.cleared(x_q, call.lengths, order)
        q = p["query"](x if self.q_rank is None else p["query_norm"](p["query_down"](x)))
        R = self.rope_dim
        H = q.shape[-1] - R
        kv = p["kv_down"](x)
        latent = p["kv_norm"](kv[..., : self.kv_rank])
        to_turn = self.rotary, q[..., H:], kv[..., None, self.kv_rank :]
        places: Any = turn_positions(*to_turn, call.positions, order, cache, call.lengths)
        q_rope, r = turn(*to_turn, *places)
        c = latent[..., None, :]
        heads = core.Heads(_joined(q[..., :H], q_rope), r, c, order=order, kept=lambda k, v: (r, c))
        has_slots = isinstance(cache, KVCache)
        if call.tap.is_active or not has_slots:
            heads = heads._replace(k=_joined(p["key"](latent), r), v=p["value"](latent))
        if has_slots:
            call.tap.refuse("kv", "a cache, which has only latents; edit `z` or `out`")
        absorbed = functools.partial(_absorbed, p["key"], p["value"])
        call = dataclasses.replace(
            call, scale=(H + R) ** -0.5 if self.scale is None else call.scale,
            attention=absorbed if has_slots else call.attention,
        )  # fmt: skip
        return core.attend(p, self, heads, call, cache)._replace(kv=None)

    @nn.nowrap
    def check_fields(self) -> None:
        """Check the fields."""
        super().check_fields()
        checks.positive(kv_rank=self.kv_rank, rope_dim=self.rope_dim)
        checks.optional(q_rank=self.q_rank)
        if self.rotary is None:
            raise ValueError("latent attention needs rotary, got None; give positions.Rotary()")
        absent = ("num_kv_heads", "qk_norm", "normalize_qk", "gate", "attention_fn", "exclusive")
        common.check("latent attention", self, absent)

    @nn.nowrap
    def table(self, D: int, Dk: int, Dv: int) -> Table:
        """Return the parameters."""
        (N, _, H, Hv), R, rank = self.sizes(D), self.rope_dim, self.kv_rank
        norm = QKNorm(epsilon=self.norm_epsilon)
        entries: Table = {}

        def add(name: str, inputs: int, features: Shape, *names: str | None) -> None:
            biased = has_bias(self.use_bias, name)
            entries[name] = LinearEntry((inputs,), features, names, biased)

        if self.q_rank is not None:
            add("query_down", D, (self.q_rank,), "embed", None)
            entries["query_norm"] = NormEntry((self.q_rank,), norm)
        add("query", self.q_rank or D, (N, H + R), None, "heads", None)
        add("kv_down", D, (rank + R,), "embed", None)
        entries["kv_norm"] = NormEntry((rank,), norm)
        add("key", rank, (N, H), None, "heads", "head_dim")
        add("value", rank, (N, Hv), None, "heads", "head_dim")
        return entries | self.out_table(N, Hv, D) | self.score_table(H)


def _absorbed(key: Linear, value: Linear, q: jax.Array, r: Stored, c: Stored, **call: Any) -> Any:
    """Attend to latents in a cache: one head of keys [c, r] and values c for all queries."""
    rotated, latent = (dequantize(x.replace(dtype=q.dtype)) for x in (r, c))
    q, q_rope = jnp.split(q, [q.shape[-1] - r.shape[-1]], -1)
    q = _product("...tnh,rnh->...tnr", key, q)
    k, v = (_with_bias(linear, latent) for linear in (key, value))
    if call["scores"] or call["bias"] is not None or not symbols.at_most(q.shape[-3], 64):
        q, k = _joined(q, q_rope), jnp.concatenate([k, rotated], -1)
    else:
        # For few tokens, as scores of their own, because joined keys are a copy of the cache.
        names = ("batch", "heads", None, c.slots)
        call["bias"] = sharding.auto(_scores, names, q_rope, rotated, call["scale"])
    # As slots of the cache, which may be sharded.
    slots = (c.replace(values=x, scale=None) for x in (k, v))
    of_heads = functools.partial(_product, "...tnr,rnh->...tnh", value)
    return common.attend(of_heads, q, *slots, **call)


def _scores(q: jax.Array, k: jax.Array, scale: Any) -> jax.Array:
    """Return the scores [*B, N, T, S] of queries [*B, T, N, R] and keys [*B, S, 1, R]."""
    s = jnp.einsum("...tnr,...skr->...nts", q, k, preferred_element_type=shapes.wide(q.dtype))
    return s * jnp.asarray(scale, s.dtype)


def _with_bias(linear: Linear, c: jax.Array) -> jax.Array:
    """Append a 1 to latents [*B, S, 1, rank] if the map from them has a bias."""
    return c if linear.bias is None else jnp.concatenate([c, jnp.ones_like(c[..., :1])], -1)


def _product(sums: str, linear: Linear, x: jax.Array) -> jax.Array:
    """Multiply by a kernel [rank, N, ·], whose bias is one more row."""

    def product(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        kernel = kernel if bias is None else jnp.concatenate([kernel, bias[None]])
        return jnp.einsum(sums, x, kernel.astype(x.dtype), precision=linear.precision)

    return sharding.auto(product, sharding.HEADS, x, linear.kernel, linear.bias)


def _joined(x: jax.Array, rotated: jax.Array) -> jax.Array:
    """Join features of heads [*B, T, N, ·] and rotated ones [*B, T, N|1, R]."""

    def join(x: jax.Array, rotated: jax.Array) -> jax.Array:
        rotated = jnp.broadcast_to(rotated, (*x.shape[:-1], rotated.shape[-1]))
        return jnp.concatenate([x, rotated], -1)

    return sharding.auto(join, sharding.HEADS, x, rotated)
