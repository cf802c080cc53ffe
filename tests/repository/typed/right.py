"""Correct calls: type checkers find no error, and infer the type of each result."""

from typing import Any, assert_type

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import flax_mha
from flax_mha import (
    Explanation,
    Generated,
    MultiHeadAttention,
    SelfAttention,
    dot_product_attention,
    interop,
    masks,
    scores,
    sharding,
)

x = jnp.zeros((2, 4, 16))
q = jnp.zeros((2, 4, 2, 8))

# The result of a call is not typed: an array, or a tuple with further outputs.
result: jax.Array = dot_product_attention(q, q, q, mask=np.ones(4, bool), kernel="ring")
out, weights, lse = dot_product_attention(q, q, q, return_weights=True, return_residuals=True)
assert_type(flax_mha.explain(q, q, q, mask=masks.Window(2) & masks.Causal()), Explanation)
mask = masks.Causal() & masks.Window(3, 0) | ~masks.Keys(np.ones((2, 4), bool))


class Diagonal(masks.Mask):
    def allowed(self, at: masks.At) -> jax.Array:
        return jnp.asarray(at.q == at.k)


dot_product_attention(q, q, q, mask=Diagonal() & mask, scores=(scores.Alibi(),))
layer = MultiHeadAttention(num_heads=4, num_kv_heads=2, rotary=flax_mha.positions.Rotary())
block = flax_mha.EncoderBlock(layer, mlp_dim=32, norm="rmsnorm")
encoder = flax_mha.Encoder(num_layers=2, block=block)
assert_type(interop.swap(encoder), flax_mha.Encoder)
assert_type(sharding.init(encoder, jax.random.key(0), x), dict[str, Any])


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y, _ = layer(x, x, mask=masks.Causal(), return_weights=True)
        y, kv = layer(y, return_kv=True, qkv_dot_general=None)
        y = block(layer(y, kv=kv), kv=(kv.key, kv.value))
        y = SelfAttention(num_heads=4)(y, masks.Causal(), True)
        return encoder(y)


def on_nnx(layer: flax_mha.nnx.MultiHeadAttention, x: jax.Array) -> jax.Array:
    y, _ = layer(x, x, mask=masks.Window(2), decode=False, return_weights=True, rngs=nnx.Rngs(0))
    out: jax.Array = layer(y)
    return out


def continued(model: flax_mha.LanguageModel, prompt: jax.Array) -> Generated:
    generated = flax_mha.generate(model, {}, prompt, max_new_tokens=3, temperature=0.5)
    assert_type(generated.tokens, jax.Array)
    return generated


def on_cache(held: flax_mha.KVCache, key: jax.Array) -> flax_mha.KVCache:
    _, held = held.extend(q, key, key, mask=masks.Window(2))
    return held
