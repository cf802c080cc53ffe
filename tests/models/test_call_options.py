"""Options of a call reach the layer through every block, stack and model."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

from flax_mha import (
    Classifier,
    Decoder,
    DecoderBlock,
    Encoder,
    EncoderBlock,
    LanguageModel,
    MultiHeadAttention,
    masks,
    scores,
)
from flax_mha.layer import core
from flax_mha.linen import LayerOptions
from flax_mha.models import TokenEmbedding
from flax_mha.positions import Rotary
from tests.support.arrays import random_variables

B, T, D, N = 2, 5, 8, 2
KEY = jax.random.key(0)
X = jax.device_put(np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32))
TOKENS = np.ones((B, T), np.int32)
GIVEN: dict[str, Any] = {
    "mask": masks.Window(2, 2),
    "bias": np.ones((N, T, T), np.float32),
    "scores": (scores.SoftCap(3.0),),
    "positions": np.arange(T, dtype=np.int32) + 7,
    "head_mask": np.array([1.0, 0.0], np.float32),
    "lengths": np.array([5, 2], np.int32),
    "order": np.arange(T)[::-1].copy(),
    "kv": (np.ones((B, T, N, D // N), np.float32),) * 2,
    "deterministic": False,
    "dropout_rng": jax.random.key(3),
    "sow_weights": True,
}


def layer(**fields: Any) -> MultiHeadAttention:
    return MultiHeadAttention(N, **{"rotary": Rotary(), "dropout_rate": 0.1} | fields)


ENCODER = Encoder(2, EncoderBlock(layer(), mlp_dim=8))
DECODER = Decoder(2, DecoderBlock(layer(), mlp_dim=8))
EMBEDDING = TokenEmbedding(11, D)
MODELS: dict[str, tuple[nn.Module, Any]] = {
    "layer": (layer(), X), "encoder block": (ENCODER.block, X),
    "decoder block": (DECODER.block, X), "encoder": (ENCODER, X), "decoder": (DECODER, X),
    "language model": (LanguageModel(EMBEDDING, DECODER), TOKENS),
    "classifier": (Classifier(EMBEDDING, ENCODER, 3), TOKENS),
}  # fmt: skip


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the arguments of each call of the core."""
    found: list[dict[str, Any]] = []
    real = core.attend

    def attend(p, settings, heads, call, cache):
        found.append(vars(call) | {"kv": cache})
        return real(p, settings, heads, call, cache)

    monkeypatch.setattr(core, "attend", attend)
    return found


def test_options_table_is_complete() -> None:
    assert set(GIVEN) == set(LayerOptions.__annotations__)


@pytest.mark.sampled(0.06)
@pytest.mark.parametrize("name_of_model", MODELS)
def test_each_argument_reaches_the_layer(name_of_model: str, arrived: list[Any]) -> None:
    built, x = MODELS[name_of_model]
    variables = jax.eval_shape(lambda: built.init(KEY, x, deterministic=True))
    for name, value in GIVEN.items():
        arrived.clear()
        options = {"deterministic": False} | {name: value}

        def apply(variables: Any, rng: Any, options: Any = options) -> Any:
            rngs = {} if "dropout_rng" in options else {"dropout": rng}
            return built.apply(variables, x, **options, rngs=rngs, mutable=["intermediates"])

        _, sown = jax.eval_shape(apply, variables, KEY)
        for call in arrived:
            if name in ("deterministic", "dropout_rng"):
                assert call["dropout_rng"] is not None
            elif name == "sow_weights":
                assert "attention_weights" in str(sown)
            elif name == "kv":
                assert call["kv"].key is value[0]
                assert call["kv"].value is value[1]
            elif name == "mask":
                assert str(value) in str(call["mask"])
            else:
                np.testing.assert_array_equal(call[name], value)
        assert arrived


@pytest.mark.sampled(0.08)
def test_layers_with_one_dropout_key_drop_different_weights(arrived: list[Any]) -> None:
    cross = DecoderBlock(layer(), mlp_dim=8, cross_attention=layer(rotary=None))
    decoder = Decoder(2, cross)
    variables = random_variables(decoder, X, X, deterministic=True)
    arrived.clear()

    @jax.jit
    def keys(key: jax.Array) -> list[jax.Array]:
        decoder.apply(variables, X, X, deterministic=False, dropout_rng=key)
        return [jax.random.key_data(call["dropout_rng"]) for call in arrived]

    assert len({str(key) for key in keys(jax.random.key(3))}) == len(arrived) == 4
