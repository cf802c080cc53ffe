"""Talking-heads attention: heads mix their scores, and their weights."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import PrecisionLike

from flax_mha import core, sharding
from flax_mha.attention import MultiHeadAttention
from flax_mha.call import Call, Settings
from flax_mha.scores.base import without_vectors
from flax_mha.shared import Shared
from flax_mha.variants import common


class TalkingHeadsAttention(MultiHeadAttention):
    """Attention whose heads mix their scores before the softmax, and their weights after it.

        s_n = Σ_m P_mn q_m k_mᵀ / √H,    w_n = softmax(s_n),    out_n = Σ_m W_mn w_m v_n

    with P `mix_scores` and W `mix_weights` [N, N], which begin as the identity. Other scores, the
    mask, sinks and dropout are those of a mixed head n, and so are weights that are returned or
    captured. All fields and arguments are those of `MultiHeadAttention`, but that there is no
    `attention_fn`, that `scale` is a number, and that no scores see queries and keys.

    The sums go into longer vectors, so that any kernel computes them: query n is all P_mn q_m,
    key and value those of all heads. Beside them memory is that of the kernel, no head's scores
    wait for another's; both products take K times those of `MultiHeadAttention`.

    Source: Shazeer et al., "Talking-Heads Attention", 2020.
    """

    @nn.nowrap
    def compute(
        self, x_q: jax.Array, x_k: jax.Array | None, x_v: jax.Array | None,
        settings: Settings, call: Call, cache: core.Held,
    ) -> core.Output:  # fmt: skip
        """See `MultiHeadAttention.compute`."""
        without_vectors("talking-heads attention", settings.scores, call.scores)
        common.check("talking-heads attention", self, ("attention_fn",))
        if isinstance(cache, Shared):
            raise ValueError("talking-heads attention has keys of its own, got kv; leave it out")
        weights = self.weights(x_q, x_k, x_v)
        heads = core.projected(weights, settings, x_q, x_k, x_v, call, cache)
        _, K, H, _ = self.sizes(x_q.shape[-1])
        if settings.scale is None:
            settings = dataclasses.replace(settings, scale=H**-0.5)
        mix = functools.partial(_mixed_queries, K, self.precision)
        q = sharding.auto(mix, sharding.HEADS, heads.q, self._mixing("mix_scores"))
        k, v = (
            None if x is None else sharding.auto(_as_one, sharding.KV_HEADS, x)
            for x in (heads.k, heads.v)
        )
        own = functools.partial(_own_values, K, self.precision)
        attention = functools.partial(_mixed, own, self._mixing("mix_weights"))
        heads, call = heads._replace(q=q, k=k, v=v), dataclasses.replace(call, attention=attention)
        # Keys and values are in the form of this layer alone.
        return core.attend(weights, settings, heads, call, cache)._replace(kv=None)

    @nn.nowrap
    def _mixing(self, name: str) -> jax.Array:
        """From each head to each."""
        init = sharding.named(_identity, (None, "heads"), self.partitioned)
        return self.param(name, init, (self.num_heads,) * 2, self.param_dtype)


def _mixed(own: Any, mixing: jax.Array, q: jax.Array, k: Any, v: Any, **call: Any) -> Any:
    """Attention to the values of all heads, of which each takes its own by mixed weights."""

    def mixed(out: jax.Array) -> jax.Array:
        return sharding.auto(own, sharding.HEADS, out, mixing)

    return common.attend(mixed, q, k, v, **call)


def _mixed_queries(K: int, precision: PrecisionLike, q: jax.Array, mixing: jax.Array) -> jax.Array:
    """Of q [*B, T, N, H] what meets the keys of all K heads: [*B, T, N, K·H]."""
    *tokens, N, H = q.shape
    mixing = mixing.astype(q.dtype).reshape(K, -1, N)
    q = q.reshape(*tokens, K, -1, H)
    mixed = jnp.einsum("...tkgh,kgn->...tnkh", q, mixing, precision=precision)
    return mixed.reshape(*tokens, N, K * H)


def _own_values(K: int, precision: PrecisionLike, x: jax.Array, mixing: jax.Array) -> jax.Array:
    """Of values of all K heads by the weights of each, [*B, T, N, K·Hv]: [*B, T, N, Hv]."""
    *tokens, N, features = x.shape
    mixing = mixing.astype(x.dtype).reshape(N, K, -1)
    x = x.reshape(*tokens, N, K, features // K)
    return jnp.einsum("...tmkh,mkg->...tkgh", x, mixing, precision=precision).reshape(
        *tokens, N, features // K
    )


def _as_one(x: jax.Array) -> jax.Array:
    """Heads [*B, S, K, H] as one [*B, S, 1, K·H]."""
    return x.reshape(*x.shape[:-2], 1, -1)


def _identity(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    del key
    return jnp.eye(shape[0], dtype=dtype)
