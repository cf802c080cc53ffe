"""Mistakes that type checkers find, each on its own marked line."""

import flax.linen as nn
import jax
import jax.numpy as jnp

import flax_mha
from flax_mha import MultiHeadAttention, dot_product_attention, masks

q = jnp.zeros((2, 4, 2, 8))

dot_product_attention(q, q, q, msk=masks.Causal())  # error
dot_product_attention(q, q, q, return_weights=1)  # error
flax_mha.explain(q, q, q, scales=0.5)  # error
MultiHeadAttention(num_heads="4")  # error
MultiHeadAttention(num_head=4)  # error
flax_mha.MultiheadAttention(num_heads=4)  # error
flax_mha.EncoderBlock(MultiHeadAttention(4), mlp_dims=64)  # error
masks.Causal(3)  # error
masks.Casual()  # error


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layer = MultiHeadAttention(num_heads=4)
        x = layer(x, retrun_weights=True)  # error
        x = layer(x, qkv_dot_general=jnp.dot)  # error
        return x


def continued(model: flax_mha.LanguageModel, prompt: jax.Array) -> jax.Array:
    flax_mha.generate(model, {}, prompt, max_new_token=3)  # error
    found = flax_mha.generate(model, {}, prompt, max_new_tokens=3)
    return found.token  # error
