"""Generation with any function of a cache instead of flax_mha's models."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_mha
from flax_mha import KVCache, generate
from tests.support.decoding import greedy

V, D, N, NEW = 7, 8, 2, 5
PROMPT = np.array([[3, 4, 2], [2, 5, 1]])


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.position_table = nnx.Embed(32, D, rngs=rngs)
        self.attention = flax_mha.nnx.MultiHeadAttention(N, D, rngs=rngs)
        self.head = nnx.Linear(D, V, rngs=rngs)

    def __call__(self, tokens, positions, decode):
        x = self.embed(tokens) + self.position_table(positions)
        return self.head(3 * (x + self.attention(x, decode=decode, is_causal=True)))


def nnx_model() -> tuple[Any, Any, Any]:
    model = Nnx(nnx.Rngs(0))
    plain, state = nnx.split(model)

    def whole(tokens):
        positions = jnp.arange(tokens.shape[1])[None] + 0 * tokens
        return nnx.merge(plain, state)(tokens, positions, False)

    cached = nnx.clone(model)
    cached.attention.init_cache((2, len(PROMPT[0]) + NEW, D))
    graph, params, cache = nnx.split(cached, nnx.Param, ...)

    def step(variables, cache, tokens, positions):
        model = nnx.merge(graph, variables, cache)
        logits = model(tokens, positions, True)
        return logits, nnx.split(model, nnx.Param, ...)[2]

    return step, (params, cache), whole


@pytest.mark.sampled(0.08)
def test_greedy_matches_greedy_without_cache() -> None:
    step, (variables, cache), whole = nnx_model()
    found = generate(step, variables, PROMPT, max_new_tokens=NEW, cache=cache)
    np.testing.assert_array_equal(found.tokens, greedy(whole, PROMPT, NEW))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"cache": None}, ValueError, r"with it, got function and a cache of None"),
        *(
            ({name: value}, ValueError, "none to Whisper or a step without")
            for name, value in (("lengths", np.array([1, 2])), ("attention_mask", PROMPT > 0))
        ),
        ({"max_new_tokens": 7}, ValueError, r"room for 9 tokens, the .* got 8; enlarge"),
        ({"start": 1}, ValueError, r"start must be given for a Translator"),
    ],
)  # fmt: skip
def test_invalid_steps_and_caches_raise(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    call = {"max_new_tokens": 2, "cache": [KVCache.empty((2,), 8, 2, 4)]} | given
    with pytest.raises(error, match=message):
        generate(lambda *_: None, {}, PROMPT, **call)
