"""Talking-heads attention: heads mix their scores, and their weights."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import PrecisionLike
from jax.tree_util import Partial

from flax_mha import sharding
from flax_mha.base import numerics, shapes
from flax_mha.cache import KeyValues
from flax_mha.layer import core
from flax_mha.layer.core import Output
from flax_mha.layer.parameters import ArrayEntry, Table
from flax_mha.layer.settings import Call
from flax_mha.linen import MultiHeadAttention
from flax_mha.scores.score_mod import without_vectors
from flax_mha.sharding import rules
from flax_mha.variants import common


class TalkingHeadsAttention(MultiHeadAttention):
    """Attention whose heads mix their scores before the softmax and their weights after it.

        s_n = Σ_m P_mn q_m k_mᵀ / √H,    w_n = softmax(s_n),    out_n = Σ_m W_mn w_m v_n

    with P `mix_scores` and W `mix_weights` [N, N], initially the identity. Scores, the mask, sinks,
    dropout and the weights belong to a mixed head n. There is no `attention_fn`, `exclusive`,
    learned `scale`, or score that reads queries and keys.

    Longer vectors compute the sums, so any kernel works: query n holds all P_mn q_m, and each key
    and value holds all heads. Both products take K times as long as in `MultiHeadAttention`.

    Source: Shazeer et al., "Talking-Heads Attention", 2020.
    """

    mixes_heads = True  # By learned matrices.

    @nn.nowrap
    def compute(self, p: Any, x_q: Any, x_k: Any, x_v: Any, call: Call, cache: Any) -> Output:
        """Compute the layer."""
        without_vectors("talking-heads attention", call.scores)
        if isinstance(cache, KeyValues):
            raise ValueError("talking-heads attention has keys of its own, got kv; leave it out")
        heads = core.project_heads(p, self, x_q, x_k, x_v, call, cache)
        K = self.num_kv_heads or self.num_heads
        H = heads.q.shape[-1]
        mix_queries = Partial(_mixed_queries, K, self.precision)
        q = _mix(mix_queries, True, K * H, heads.q, p["mix_scores"])
        as_one = functools.partial(sharding.auto, _as_one, sharding.KV_HEADS)
        k, v = jax.tree.map(as_one, (heads.k, heads.v))
        own_values = Partial(_own_values, K, self.precision)

        def mix_weights(x: jax.Array) -> jax.Array:
            return _mix(own_values, False, x.shape[-1] // K, x, p["mix_weights"])

        call = dataclasses.replace(
            call, attention=functools.partial(common.attend, mix_weights),
            # Mixed queries are longer.
            scale=H**-0.5 if self.scale is None else call.scale,
        )  # fmt: skip
        # Other layers cannot read these keys and values.
        return core.attend(p, self, heads._replace(q=q, k=k, v=v), call, cache)._replace(kv=None)

    @nn.nowrap
    def check_fields(self) -> None:
        """Check the fields."""
        super().check_fields()
        common.check("talking-heads attention", self, ("attention_fn", "exclusive"))

    @nn.nowrap
    def table(self, D: int, Dk: int, Dv: int) -> Table:
        """Return the parameters."""
        N = self.num_heads
        mixing = ArrayEntry((N, N), (None, "heads"), _identity, is_random=False)
        return super().table(D, Dk, Dv) | {"mix_scores": mixing, "mix_weights": mixing}


def _mix(
    fn: Callable[..., jax.Array], gathers: bool, features: int, x: jax.Array, mixing: jax.Array
) -> jax.Array:
    """Return fn(x, mixing) [*B, T, N, features] for heads x [*B, T, N, ·], sharded by heads.

    If it `gathers`, a device reads all heads; otherwise the results of all devices are summed.
    """
    axes = rules.unpack_entry(sharding.spec(x.shape, sharding.HEADS)[-2])
    if not axes:
        return sharding.auto(fn, sharding.HEADS, x, mixing)
    names = (None, "heads") if gathers else ("heads", None)
    out = ((*x.shape[:-1], features), sharding.HEADS)
    on_shard = Partial(_mix_shard, fn, gathers, axes)
    return sharding.local(on_shard, [sharding.HEADS, names], out, x, mixing)


def _mix_shard(
    fn: Callable[..., jax.Array], gathers: bool, axes: tuple[str, ...], x: jax.Array,
    mixing: jax.Array,
) -> jax.Array:  # fmt: skip
    axis = x.ndim - 2
    if not gathers:
        return jax.lax.psum_scatter(fn(x, mixing), axes, scatter_dimension=axis, tiled=True)

    # Under a scan, the backward pass gathers x again.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def mix_all(x: jax.Array, mixing: jax.Array) -> jax.Array:
        return fn(jax.lax.all_gather(x, axes, axis=axis, tiled=True), mixing)

    return mix_all(x, mixing)


def _mixed_queries(K: int, precision: PrecisionLike, q: jax.Array, mixing: jax.Array) -> jax.Array:
    """Mix queries [*B, T, N, H] to [*B, T, n, K·H], for keys of all heads."""
    *tokens, N, H = q.shape
    n = mixing.shape[-1]
    q, mixing = q.reshape(*tokens, K, N // K, H), mixing.reshape(K, N // K, n)
    mixed = _product("...tkgh,kgn->...tnkh", q, mixing, precision)
    return mixed.reshape(*tokens, n, K * H)


def _own_values(K: int, precision: PrecisionLike, x: jax.Array, mixing: jax.Array) -> jax.Array:
    """Mix values of all K heads [*B, T, n, K·Hv] to [*B, T, N, Hv]."""
    *tokens, n, features = x.shape
    x, mixing = x.reshape(*tokens, n, K, features // K), mixing.reshape(n, K, -1)
    values = _product("...tmkh,mkg->...tkgh", x, mixing, precision)
    return jax.lax.collapse(values, len(tokens), len(tokens) + 2)


def _product(sums: str, x: jax.Array, mixing: jax.Array, precision: PrecisionLike) -> jax.Array:
    """Return a product in the dtype of x, whose gradients are summed in float32 at least."""
    wide = shapes.wide(x.dtype)
    mixing = numerics.spread(mixing, mixing.shape, wide)
    return jnp.einsum(sums, x.astype(wide), mixing, precision=precision).astype(x.dtype)


def _as_one(x: jax.Array) -> jax.Array:
    """Join heads [*B, S, K, H] to one [*B, S, 1, K·H]."""
    return jax.lax.collapse(x, x.ndim - 2)[..., None, :]


def _identity(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.eye(shape[0], dtype=dtype)
