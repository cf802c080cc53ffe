"""Sparse attention learns associative recall as well as full attention.

A row states the values of keys in any order, one fact per token, and then queries some of them.
After Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models", 2023.
Here a fact is one token, so one layer is enough.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from flax_mha import MultiHeadAttention, QKNorm, masks
from flax_mha.variants import ChosenBlocksAttention
from tests.support import pages

KEYS, VALUES, FACTS, ASKED = 32, 8, 24, 8
FIELDS: dict[str, Any] = {"num_heads": 2, "head_dim": 32, "qk_norm": QKNorm("rmsnorm")}
# 6 of the 16 blocks, two tokens each.
BLOCKS = {"block": 2, "count": 6}
STEPS = 400


class Recall(nn.Module):
    """A model that predicts the value of the key that each token queries."""

    attention: nn.Module

    @nn.compact
    def __call__(self, keys: jax.Array, values: jax.Array) -> jax.Array:
        x = nn.Embed(KEYS, 64)(keys) + nn.Embed(VALUES + 1, 64)(values)
        x = x + self.attention(x)
        return nn.Dense(VALUES)(nn.LayerNorm()(x))


def draw(key: jax.Array, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the tokens' keys, their values with queried ones hidden, and the hidden values."""
    of_keys, of_values, of_asked = jax.random.split(key, 3)
    keys = jnp.argsort(jax.random.uniform(of_keys, (rows, KEYS)))[:, :FACTS]
    values = jax.random.randint(of_values, (rows, FACTS), 0, VALUES)
    asked = jax.random.randint(of_asked, (rows, ASKED), 0, FACTS)
    again, expected = (jnp.take_along_axis(x, asked, 1) for x in (keys, values))
    hidden = jnp.full_like(expected, VALUES)
    keys, values = jnp.concatenate([keys, again], 1), jnp.concatenate([values, hidden], 1)
    return keys, values, expected


def accuracy(attention: nn.Module) -> float:
    """Return the accuracy on rows that were not trained on."""
    model = Recall(attention)
    optimizer = optax.adam(optax.cosine_decay_schedule(5e-3, STEPS))

    def loss(params: Any, key: jax.Array) -> jax.Array:
        *tokens, expected = draw(key, 32)
        logits, sown = model.apply({"params": params}, *tokens, mutable=["losses"])
        error = optax.softmax_cross_entropy_with_integer_labels(logits[:, FACTS:], expected)
        return error.mean() + sum(map(jnp.sum, jax.tree.leaves(sown)))

    def step(state: Any, key: jax.Array) -> tuple[Any, None]:
        params, moments = state
        updates, moments = optimizer.update(jax.grad(loss)(params, key), moments, params)
        return (optax.apply_updates(params, updates), moments), None

    @jax.jit
    def run() -> jax.Array:
        *tokens, expected = draw(jax.random.key(3), 512)
        params = model.init(jax.random.key(0), *tokens)["params"]
        keys = jax.random.split(jax.random.key(1), STEPS)
        (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), keys)
        logits = model.apply({"params": params}, *tokens)
        return (logits[:, FACTS:].argmax(-1) == expected).mean()

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return float(run())


def sparse() -> nn.Module:
    """Build the layer of docs/recipes.md with 8 of the 32 tokens."""
    blocks = pages.blocks("python", pages.read("docs/recipes.md"))
    scope: dict[str, Any] = {"jax": jax, "jnp": jnp, "nn": nn, "masks": masks}
    scope |= {"MultiHeadAttention": MultiHeadAttention, "rng": jax.random.key(0)}
    exec(next(code for code in blocks if "class SparseAttention" in code), scope)
    return scope["SparseAttention"](tokens=8, **FIELDS)


LAYERS = {
    "all": lambda: MultiHeadAttention(mask=masks.Causal(), **FIELDS),
    "MoBA": lambda: ChosenBlocksAttention(**BLOCKS, **FIELDS),
    "DeepSeek": sparse,
}


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", LAYERS)
def test_attention_learns_recall(name: str, optimized: None) -> None:
    assert accuracy(LAYERS[name]()) > 0.95


@pytest.mark.slow
def test_window_of_equal_size_fails_recall(optimized: None) -> None:
    """As many keys are not enough if they are the nearest ones."""
    near = masks.Window(BLOCKS["block"] * BLOCKS["count"] - 1, 0)
    assert accuracy(MultiHeadAttention(mask=near, **FIELDS)) < 0.6
