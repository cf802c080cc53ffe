"""Models on meshes are initialized sharded and have the gradients of one device."""

import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mha import Classifier, DecoderBlock, Encoder, EncoderBlock, MultiHeadAttention, sharding
from flax_mha.models import Decoder, LanguageModel, PatchEmbedding, TokenEmbedding, Translator
from flax_mha.positions import Rotary
from tests.support.meshes import BACKWARD, KEY, KINDS, RNG, B, X, changed, on
from tests.support.oracle import error


class Reader(nn.Module):
    """A translator from a text to itself."""

    translator: Translator

    def __call__(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
        return self.translator(x, x, deterministic=deterministic)


# Without biases: the softmax cancels the key bias, so its gradient is 0.
CROSS = MultiHeadAttention(8, use_bias=False)
LAYER = MultiHeadAttention(8, num_kv_heads=4, rotary=Rotary(), dropout_rate=0.1)
# One layer: several would take longer to compile.
ENCODER = Encoder(1, EncoderBlock(LAYER, 64, gated=True, dropout_rate=0.1))
MODELS: dict[str, tuple[nn.Module, jax.Array, Any]] = {
    "encoder": (ENCODER, X, sharding.RULES),
    "scanned and recomputed": (
        Encoder(2, EncoderBlock(LAYER, 64, norm="rmsnorm", remat=True), scan=True),
        X,
        sharding.RULES,
    ),
    "FSDP": (ENCODER, X, changed(embed="data")),
    "sequence parallel norms": (ENCODER, X, changed(norm_length="model")),
    "everything by positions": (
        ENCODER,
        X,
        changed(batch=None, length="data", norm_length=("data", "model")),
    ),
    "images": (
        Classifier(PatchEmbedding(2, 32), ENCODER, 10),
        jnp.ones((B, 8, 8, 1)),
        sharding.RULES,
    ),
    "language model": (
        LanguageModel(TokenEmbedding(16, 32), Decoder(2, DecoderBlock(LAYER, 64), scan=True)),
        jnp.asarray(RNG.integers(0, 16, (B, 12))),
        changed(embed="data"),
    ),
    "translator": (
        Reader(
            Translator(
                Encoder(1, EncoderBlock(LAYER, 64)),
                LanguageModel(
                    TokenEmbedding(16, 32),
                    Decoder(1, DecoderBlock(LAYER, 64, cross_attention=CROSS)),
                    tied=False,
                ),
            )
        ),
        jnp.asarray(RNG.integers(0, 16, (B, 12))),
        sharding.RULES,
    ),
    "tokens": (
        Classifier(TokenEmbedding(16, 32), ENCODER, 10, "sinusoidal", 0.1),
        jnp.asarray(RNG.integers(0, 16, (B, 12))),
        changed(embed="data"),
    ),
}


# The others by turns; those that take long where nothing is left to the compiler to guess.
KIND = dict(zip(MODELS, itertools.cycle(KINDS))) | {
    "language model": "Explicit", "translator": "Explicit",
}  # fmt: skip


def model_loss(name: str) -> Any:
    def loss(params: Any, x: jax.Array) -> Any:
        out = MODELS[name][0].apply(params, x, deterministic=False, rngs={"dropout": KEY})
        return jnp.sum(jnp.sin(out)), out

    return jax.jit(jax.grad(loss, has_aux=True))


@functools.cache
def without_a_mesh(name: str) -> tuple[Any, Any]:
    """Return a model's parameters, gradients and output."""
    model, inputs, _ = MODELS[name]
    params = jax.jit(functools.partial(model.init, deterministic=True))(KEY, inputs)
    return params, model_loss(name)(params, inputs)


@pytest.mark.sampled(0)
@pytest.mark.parametrize(("name", "kind"), [("encoder", "Explicit"), *KIND.items()])
def test_models_on_meshes_match_one_device(name: str, kind: str) -> None:
    model, inputs, rules = MODELS[name]
    params, wanted = without_a_mesh(name)
    mesh, leave = on(kind, rules)
    try:
        sharded = sharding.init(model, KEY, inputs, deterministic=True)
        x = jax.device_put(inputs, NamedSharding(mesh, P("data")))
        got = jax.device_get(model_loss(name)(sharded, x))
        sharded = jax.device_get(sharded)
    finally:
        leave()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), sharded, params)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert error(a, b) < BACKWARD
