"""A translation model as published ones are written, with Flax's layers, swapped or replaced."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_mha
from flax_mha import interop
from tests.support.oracle import error, random_like

KEY = jax.random.key(1, impl="unsafe_rbg")
SOURCE = np.array([[3, 4, 5, 0], [7, 8, 2, 6]])
TARGET = np.array([[0, 1, 5], [0, 3, 4]])


class Translator(nn.Module):
    """One layer for each side, an own counter of positions, and a decoder for one token a call."""

    attention: Any = nn.MultiHeadDotProductAttention
    decode: bool = False

    def setup(self) -> None:
        self.embed = nn.Embed(9, 8)
        self.encoder = self.attention(2, dropout_rate=0.1, deterministic=True, use_bias=False)
        self.decoder = self.attention(2, decode=self.decode)
        self.cross = self.attention(2, qkv_features=4)

    def encode(self, source: Any) -> Any:
        x = self.embed(source)
        return x + self.encoder(x, mask=nn.make_attention_mask(source > 0, source > 0))

    @nn.compact
    def step(self, encoded: Any, source: Any, target: Any) -> Any:
        places = np.arange(target.shape[1])
        mask = None if self.decode else nn.make_causal_mask(target)
        if self.decode:
            starts = self.has_variable("cache", "place")
            place = self.variable("cache", "place", lambda: jnp.int32(0))
            if starts:
                places = place.value[None]
                place.value = place.value + 1
        x = (
            self.embed(target)
            + jnp.sin(jnp.float32(places)[:, None] + np.arange(8, dtype=np.float32)[None])[None]
        )
        x = x + self.decoder(x, mask=mask)
        mask = nn.make_attention_mask(jnp.ones_like(target) > 0, source > 0)
        return self.embed.attend(x + self.cross(x, encoded, mask=mask))

    def __call__(self, source: Any, target: Any) -> Any:
        return self.step(self.encode(source), source, target)


def replaced(model: Translator) -> Translator:
    return model.clone(attention=flax_mha.MultiHeadDotProductAttention)


@pytest.mark.sampled(0.13, slow=0.2)
@pytest.mark.parametrize("changed", [interop.swap, pytest.param(replaced, marks=pytest.mark.slow)])
def test_translator_decodes_in_beams_like_full_forward(changed: Any) -> None:
    variables = random_like(jax.eval_shape(Translator().init, KEY, SOURCE, TARGET))
    expected = np.asarray(jax.jit(Translator().apply)(variables, SOURCE, TARGET))
    model = changed(Translator(decode=True))
    cache = jax.jit(model.init)(KEY, SOURCE, TARGET)["cache"]
    encoded = jax.jit(lambda v: model.apply(v, SOURCE, method="encode"))(variables)

    @jax.jit
    def step(cache: Any, order: Any, rows: Any, target: Any) -> Any:
        # Beams change their order: each array with a batch is gathered.
        cache = jax.tree.map(lambda x: x[order] if x.ndim else x, cache)
        inputs = (encoded[rows], jnp.asarray(SOURCE)[rows], target)
        call = {**variables, "cache": cache}, *inputs
        return model.apply(*call, mutable=["cache"], method="step")

    rows = np.array([0, 1])
    for t in range(3):
        order = np.array([1, 0]) if t else rows
        rows = rows[order]
        out, new = step(cache, order, rows, TARGET[rows, t : t + 1])
        cache = new["cache"]
        assert error(out[:, 0], expected[rows, t]) < 1e-5
