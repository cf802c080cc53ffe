"""Models whose layers capture values, by `watch`."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, traverse_util

import flax_mha.nnx
from flax_mha import (
    Capture,
    Decoder,
    DecoderBlock,
    Encoder,
    EncoderBlock,
    LanguageModel,
    MultiHeadAttention,
    Translator,
    analysis,
    masks,
    models,
)  # fmt: skip
from tests.support import oracle

B, T, D, N = 2, 5, 8, 2
X = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
TOKENS = np.random.default_rng(0).integers(0, 7, (B, T))
LAYER = MultiHeadAttention(N)
Z = Capture(("z",))


def paths(model: nn.Module, *inputs: Any) -> list[str]:
    """Return the paths of modules that sow z, after a check that outputs stay the same."""
    watched = analysis.watch(model, Z)
    values = oracle.random_like(jax.eval_shape(model.init, jax.random.key(0), *inputs))

    def run(values: Any, *inputs: Any) -> Any:
        return watched.apply(values, *inputs, mutable="intermediates"), model.apply(values, *inputs)

    (out, sown), plain = jax.jit(run)(values, *inputs)
    np.testing.assert_array_equal(out, plain)
    flat = traverse_util.flatten_dict(sown["intermediates"], sep="/")
    assert all(name.endswith("/attention_z") for name in flat)
    assert {x[0].shape[-3:] for x in flat.values()} == {(T, N, D // N)}
    return [name.removesuffix("/attention_z") for name in flat]


def test_all_layers_of_a_stack_capture() -> None:
    encoder = Encoder(2, EncoderBlock(LAYER, mlp_dim=8))
    assert paths(encoder, X) == ["layers_0/attention", "layers_1/attention"]


def test_alternating_blocks_capture_with_their_own_masks() -> None:
    blocks = [EncoderBlock(LAYER.clone(mask=masks.Window(n, n)), mlp_dim=8) for n in (1, 2)]
    encoder = Encoder(3, blocks)
    assert paths(encoder, X) == [f"layers_{n}/attention" for n in range(3)]
    watched = analysis.watch(encoder, Z)
    assert [block.attention.mask.left for block in watched.blocks] == [1, 2]


def test_both_layers_of_a_translator_capture() -> None:
    block = DecoderBlock(LAYER, mlp_dim=8, cross_attention=LAYER.clone(num_kv_heads=1))
    decoder = LanguageModel(models.TokenEmbedding(7, D), Decoder(1, block))
    translator = Translator(Encoder(1, EncoderBlock(LAYER, mlp_dim=8)), decoder)
    assert {*paths(translator, TOKENS, TOKENS)} == {
        "encoder/layers_0/attention", "decoder/decoder/layers_0/attention",
        "decoder/decoder/layers_0/cross_attention",
    }  # fmt: skip


def test_none_removes_the_capture() -> None:
    encoder = Encoder(1, EncoderBlock(LAYER.clone(capture=Z), mlp_dim=8))
    values = jax.eval_shape(encoder.init, jax.random.key(0), X)
    run = functools.partial(analysis.watch(encoder, None).apply, mutable="intermediates")
    _, sown = jax.eval_shape(run, values, X)
    assert not sown


class Pair(nnx.Module):
    """Two nnx layers in sequence."""

    def __init__(self) -> None:
        self.layers = nnx.List(
            [flax_mha.nnx.MultiHeadAttention(N, D, rngs=nnx.Rngs(n)) for n in range(2)]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def test_an_nnx_copy_captures_and_shares_the_variables() -> None:
    model = Pair()
    watched = analysis.watch(model, Z)
    out, sown = nnx.capture(lambda m: m(X), nnx.Intermediate)(watched)
    np.testing.assert_array_equal(out, model(X))
    assert [sown["layers"][n]["attention_z"][0].shape for n in range(2)] == [(B, T, N, D // N)] * 2
    assert all(layer.capture is None for layer in model.layers)
    model.layers[0].query.kernel[...] = jnp.zeros((D, N, D // N))
    np.testing.assert_array_equal(watched.layers[0].query.kernel[...], 0)


def test_models_without_layers_in_their_fields_are_refused() -> None:
    for model in (nn.Dense(3), nnx.Linear(3, 3, rngs=nnx.Rngs(0)), Encoder(1, ())):
        with pytest.raises(ValueError, match="must hold attention layers"):
            analysis.watch(model, Z)
