"""What a user may write: type checkers find nothing here, and know what comes back."""

from typing import assert_type

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
    dot_product_attention,
    masks,
)

x = jnp.zeros((2, 4, 16))
q = jnp.zeros((2, 4, 2, 8))
known = np.zeros((2, 4, 2, 8), np.float32)

assert_type(dot_product_attention(q, q, q), jax.Array)
assert_type(dot_product_attention(known, known, known, mask=np.ones(4, bool)), jax.Array)
out, weights = dot_product_attention(q, q, q, mask=masks.Causal(), return_weights=True)
assert_type(weights, jax.Array)
out, weights, lse = dot_product_attention(q, q, q, return_weights=True, return_residuals=True)
assert_type(lse, jax.Array)
out, captured = dot_product_attention(q, q, q, capture=Capture(("entropy", "lse"), heads=(0,)))
assert_type(captured["entropy"], jax.Array)
assert_type(flax_mha.explain(q, q, q, mask=masks.Window(2) & masks.Causal()), Explanation)

layer = MultiHeadAttention(num_heads=4, num_kv_heads=2, rotary=flax_mha.positions.Rotary())
block = flax_mha.EncoderBlock(layer, mlp_dim=32, norm="rmsnorm")
encoder = flax_mha.Encoder(num_layers=2, block=block)


class Model(nn.Module):
    watched: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        assert_type(layer(x, mask=masks.Causal()), jax.Array)
        y, weights = layer(x, x, return_weights=True)
        assert_type(weights, jax.Array)
        y, kv = layer(x, return_kv=True)
        assert_type(layer(y, kv=kv), jax.Array)
        y, kv = block(x, return_kv=True)
        assert_type(block(y, kv=(kv.key, kv.value)), jax.Array)
        assert_type(layer(x, return_weights=self.watched), jax.Array | tuple[jax.Array, jax.Array])
        return encoder(y)


def on_nnx(layer: flax_mha.nnx.MultiHeadAttention, x: jax.Array) -> jax.Array:
    assert_type(layer(x, is_causal=True, decode=False, rngs=nnx.Rngs(0)), jax.Array)
    y, weights = layer(x, x, mask=masks.Window(2), return_weights=True)
    assert_type(weights, jax.Array)
    y, kv = layer(x, return_kv=True)
    return layer(y, kv=kv)


def continued(model: flax_mha.LanguageModel, prompt: jax.Array) -> Generated:
    found = flax_mha.generate(model, {}, prompt, max_new_tokens=3, temperature=0.5)
    assert_type(found.tokens, jax.Array)
    return found
