"""Detectors of heads in models that call `jit` themselves, whose traces JAX keeps."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_mha.nnx
from flax_mha import MultiHeadAttention, analysis, masks

FIRST, SECOND = jnp.array([[1, 2, 3, 1, 2, 3]]), jnp.array([[1, 2, 1, 2, 3, 3]])


class Jitted(nnx.Module):
    """An nnx model with one jitted function for all its calls."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(5, 8, rngs=rngs)
        self.attention = flax_mha.nnx.MultiHeadAttention(
            2, 8, mask=masks.Causal(), decode=False, rngs=rngs
        )
        self.run = nnx.jit(lambda attention, x: attention(x))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.run(self.attention, self.embed(tokens))


class LinenJitted(nn.Module):
    """A linen model with a jitted layer."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(5, 8)(tokens)
        return nn.jit(MultiHeadAttention)(2, mask=masks.Causal())(x)


def scores(model: Any, *args: Any) -> dict[str, jax.Array]:
    (found,) = analysis.detect(model, *args).values()
    return found


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_other_tokens_have_their_own_scores(kind: str) -> None:
    model: Any = LinenJitted() if kind == "linen" else Jitted(nnx.Rngs(0))
    variables = () if kind == "nnx" else (model.init(jax.random.key(0), FIRST),)
    scores(model, *variables, FIRST)
    after_another = scores(model, *variables, SECOND)
    jax.clear_caches()
    alone = scores(model, *variables, SECOND)
    for name, values in alone.items():
        np.testing.assert_array_equal(after_another[name], values, err_msg=name)


@pytest.mark.sampled(0.13, slow=0.2)
def test_calls_after_a_detection_sow_no_scores() -> None:
    model = Jitted(nnx.Rngs(0))
    scores(model, FIRST)
    _, sown = nnx.capture(lambda model: model(FIRST), nnx.Intermediate)(model)
    assert not jax.tree.leaves(sown)
