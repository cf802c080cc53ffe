"""Correct calls: type checkers find no error, and infer the type of each result."""

from typing import Any, assert_type

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import flax_mha
from flax_mha import (
    Capture,
    Explanation,
    Generated,
    MultiHeadAttention,
    SelfAttention,
    analysis,
    dot_product_attention,
    dot_product_attention_weights,
    interop,
    masks,
    muon_dimensions,
    scores,
    sharding,
)

x = jnp.zeros((2, 4, 16))
q = jnp.zeros((2, 4, 2, 8))
known = np.zeros((2, 4, 2, 8), np.float32)

# The result of a call is not typed: an array, or a tuple with further outputs.
result: jax.Array = dot_product_attention(q, q, q)
result = dot_product_attention(known, known, known, mask=np.ones(4, bool))
out, weights = dot_product_attention(q, q, q, mask=masks.Causal(), return_weights=True)
out, weights, lse = dot_product_attention(q, q, q, return_weights=True, return_residuals=True)
out, captured = dot_product_attention(q, q, q, capture=Capture(("entropy", "lse"), heads=(0,)))
print(weights, lse, captured["entropy"])
assert_type(flax_mha.explain(q, q, q, mask=masks.Window(2) & masks.Causal()), Explanation)

seen = masks.Causal() & masks.Window(3, 0) | ~masks.Keys(np.ones((2, 4), bool))
seen &= masks.PerHead([masks.Causal()] * 2) & masks.Documents([[2, 2]]) & masks.Prefix(2)
capped = (scores.Alibi(), scores.SoftCap(3.0), scores.Score(lambda s, b, n, i, j: s))
result = dot_product_attention(q, q, q, mask=seen, scores=capped, kernel="ring")
assert_type(dot_product_attention_weights(q, q, mask=seen), jax.Array)
print(masks.Causal().show(2, 4, q_positions=2), masks.combine(seen, None), muon_dimensions({}))


class Diagonal(masks.Mask):
    def allowed(self, at: masks.At) -> jax.Array:
        return jnp.asarray(at.q == at.k)


class Halved(scores.ScoreMod):
    def __call__(self, score: jax.Array, at: scores.At) -> jax.Array:
        return score / 2


dot_product_attention(q, q, q, mask=Diagonal() & masks.Causal(), scores=(Halved(),))
layer = MultiHeadAttention(num_heads=4, num_kv_heads=2, rotary=flax_mha.positions.Rotary())
block = flax_mha.EncoderBlock(layer, mlp_dim=32, norm="rmsnorm")
encoder = flax_mha.Encoder(num_layers=2, block=block)
assert_type(interop.swap(encoder), flax_mha.Encoder)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y, _ = layer(x, x, mask=masks.Causal(), return_weights=True)
        y, kv = layer(y, return_kv=True, qkv_dot_general=None)
        y = layer(y, kv=kv)
        y, kv = block(x, return_kv=True)
        y = block(y, kv=(kv.key, kv.value))
        y = SelfAttention(num_heads=4)(y, masks.Causal(), True)
        return encoder(y)


def on_nnx(layer: flax_mha.nnx.MultiHeadAttention, x: jax.Array) -> jax.Array:
    y, _ = layer(x, x, mask=masks.Window(2), decode=False, return_weights=True, rngs=nnx.Rngs(0))
    y, kv = layer(y, return_kv=True)
    out: jax.Array = layer(y, kv=kv)
    return out


def continued(model: flax_mha.LanguageModel, prompt: jax.Array) -> Generated:
    found = flax_mha.generate(model, {}, prompt, max_new_tokens=3, temperature=0.5)
    assert_type(found.tokens, jax.Array)
    return found


encoder_variables = sharding.init(encoder, jax.random.key(0), x)
assert_type(encoder_variables, dict[str, Any])
assert_type(analysis.watch(encoder, Capture(("weights",))), flax_mha.Encoder)


def on_cache(held: flax_mha.KVCache, key: jax.Array) -> flax_mha.KVCache:
    _, held = held.extend(q, key, key, mask=masks.Window(2))
    (_, _), held = held.extend(q, key, key, return_weights=True)
    return held


def watched(layer: flax_mha.nnx.MultiHeadAttention) -> flax_mha.nnx.MultiHeadAttention:
    return analysis.watch(layer, Capture(("weights",)))
