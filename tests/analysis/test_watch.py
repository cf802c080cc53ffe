"""Models whose layers capture values, by `watch`."""

import functools
import pickle
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
    SelfAttention,
    Translator,
    analysis,
    interop,
    models,
    variants,
)  # fmt: skip
from tests.analysis.watched_models import PATHS, InSetup, Made
from tests.support.arrays import random_variables

B, T, D, N = 2, 5, 8, 2
X = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
TOKENS = np.random.default_rng(0).integers(0, 7, (B, T))
LAYER = MultiHeadAttention(N)
Z, WEIGHTS = Capture(("z",)), Capture(("weights",))


def paths(model: nn.Module, *inputs: Any) -> list[str]:
    """Return the paths of modules that sow z, after a check that outputs stay the same."""
    watched = analysis.watch(model, Z)
    values = random_variables(model, *inputs)

    def run(values: Any, *inputs: Any) -> Any:
        return watched.apply(values, *inputs, mutable="intermediates"), model.apply(values, *inputs)

    (out, sown), plain = jax.jit(run)(values, *inputs)
    np.testing.assert_array_equal(out, plain)
    flat = traverse_util.flatten_dict(sown["intermediates"], sep="/")
    assert all(name.endswith("/attention_z") for name in flat)
    assert {x[0].shape[-3:] for x in flat.values()} == {(T, N, D // N)}
    return [name.removesuffix("/attention_z") for name in flat]


@pytest.mark.sampled(0.12)
def test_both_layers_of_a_translator_capture() -> None:
    block = DecoderBlock(LAYER, mlp_dim=8, cross_attention=LAYER.clone(num_kv_heads=1))
    decoder = LanguageModel(models.TokenEmbedding(7, D), Decoder(1, block))
    translator = Translator(Encoder(1, EncoderBlock(LAYER, mlp_dim=8)), decoder)
    assert {*paths(translator, TOKENS, TOKENS)} == {
        "encoder/layers_0/attention", "decoder/decoder/layers_0/attention",
        "decoder/decoder/layers_0/cross_attention",
    }  # fmt: skip


def test_all_layers_of_a_stack_capture() -> None:
    """None removes the capture."""
    encoder = Encoder(2, EncoderBlock(LAYER.clone(capture=Z), mlp_dim=8))
    assert paths(encoder, X) == ["layers_0/attention", "layers_1/attention"]
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
    out, sown = nnx.jit(nnx.capture(lambda m: m(X), nnx.Intermediate))(watched)
    np.testing.assert_allclose(out, nnx.jit(lambda m: m(X))(model), rtol=1e-6)
    assert [sown["layers"][n]["attention_z"][0].shape for n in range(2)] == [(B, T, N, D // N)] * 2
    assert all(layer.capture is None for layer in model.layers)
    assert watched.layers[0].config == model.layers[0].config
    model.layers[0].query.kernel[...] = jnp.zeros((D, N, D // N))
    np.testing.assert_array_equal(watched.layers[0].query.kernel[...], 0)


@pytest.mark.sampled(0.096)
@pytest.mark.parametrize("way", ["own", "swapped"])
@pytest.mark.parametrize("kind", PATHS, ids=lambda kind: kind.__name__)
def test_layers_made_in_calls_capture(kind: Any, way: str) -> None:
    """In setup, compact methods and transformations, of this library or swapped."""
    plain = kind(nn.MultiHeadDotProductAttention)
    model = kind() if way == "own" else interop.swap(plain)
    values = random_variables(plain, TOKENS)
    watched = analysis.watch(model, WEIGHTS)
    run = jax.jit(functools.partial(watched.apply, mutable="intermediates"))
    out, sown = run(values, TOKENS)
    np.testing.assert_array_equal(out, jax.jit(model.apply)(values, TOKENS))
    flat = traverse_util.flatten_dict(sown["intermediates"], sep="/")
    assert [*flat] == [f"{path}/attention_weights" for path in PATHS[kind]]
    for (weights,) in flat.values():
        np.testing.assert_allclose(np.sum(weights, -1), 1, rtol=1e-5)
    # A layer that is given keys attends to another sequence.
    assert analysis.detect(model, values, TOKENS).keys() == {*PATHS[kind]} - {"second"}


@pytest.mark.parametrize(
    "layer",
    [LAYER, SelfAttention(N), variants.TalkingHeadsAttention(N), interop.swap(nn.SelfAttention(N))],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated")
def test_a_bare_layer_captures(layer: Any) -> None:
    values = jax.eval_shape(layer.init, jax.random.key(0), X)
    watched = analysis.watch(layer, WEIGHTS)
    call = functools.partial(watched.apply, mutable="intermediates")
    _, sown = jax.eval_shape(call, values, X)
    assert sown["intermediates"]["attention_weights"][0].shape == (B, N, T, T)
    assert isinstance(watched, type(layer))


def test_watched_models_are_equal_and_pickle() -> None:
    watched = analysis.watch(interop.swap(InSetup(nn.SelfAttention)), WEIGHTS)
    assert watched == analysis.watch(interop.swap(InSetup(nn.SelfAttention)), WEIGHTS)
    assert watched != analysis.watch(interop.swap(InSetup(nn.SelfAttention)), Z)
    assert pickle.loads(pickle.dumps(watched)) == watched


def test_models_that_hold_no_layer_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must hold attention layers of .*, got Linear; swap"):
        analysis.watch(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), Z)
    with pytest.raises(TypeError, match=r"capture must be a flax_mha\.Capture"):
        analysis.watch(Made(), "weights")
