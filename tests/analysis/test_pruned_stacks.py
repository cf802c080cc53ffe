"""Models of several layers lose heads, and models that cannot are refused with the reason."""

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from flax.traverse_util import flatten_dict, unflatten_dict

from flax_mha import (
    Capture,
    Decoder,
    DecoderBlock,
    Encoder,
    EncoderBlock,
    LanguageModel,
    MultiHeadAttention,
    QKNorm,
    edits,
    generate,
    masks,
    scores,
    variants,
)
from flax_mha.analysis import prune
from flax_mha.base.coordinates import At
from flax_mha.models import Classifier, TokenEmbedding, Translator
from flax_mha.models.feed_forward import MLP
from flax_mha.positions import Rotary
from tests.analysis.pruning_cases import IDS, KEY, D, N, X, drawn
from tests.support.oracle import error


def without(variables: Any, heads: Any) -> Any:
    """Return variables whose output projections read nothing of the heads."""
    flat = flatten_dict(variables["params"])
    for path, removed in heads.items():
        name = (*path.split("/"), "out", "kernel")
        kernel = np.array(flat[name])
        if isinstance(removed, dict):
            for layer, own in removed.items():
                kernel[layer, list(own)] = 0
        else:
            kernel[..., list(removed), :, :] = 0
        flat[name] = kernel
    return {"params": unflatten_dict(flat)}


ROTATED = MultiHeadAttention(N, num_kv_heads=2, rotary=Rotary())
LOCAL = ROTATED.clone(mask=masks.Window(2))
PLAIN = MultiHeadAttention(N)
BIASED = MultiHeadAttention(N, scores=(scores.RelativeBias(),))


def language_model(*layers: Any, count: int = 2, **fields: Any) -> LanguageModel:
    blocks = tuple(DecoderBlock(layer, 24) for layer in layers)
    return LanguageModel(TokenEmbedding(20, D), Decoder(count, blocks, **fields))


def translator(**fields: Any) -> Translator:
    cross = DecoderBlock(PLAIN, 24, cross_attention=PLAIN.copy())
    encoder = Encoder(2, EncoderBlock(PLAIN, 24), **fields)
    return Translator(encoder, LanguageModel(TokenEmbedding(20, D), Decoder(2, cross)))


class Pair(nn.Module):
    """A module of a user's."""

    parts: tuple[nn.Module, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for part in self.parts:
            x = part(x)
        return x


SHARED = {"scores": (scores.RelativeBias(),)}
MODELS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "unequal layers": (
        Encoder(3, EncoderBlock(BIASED, 24)), (X,),
        {"layers_0/attention": (1,), "layers_2/attention": (0, 1, 3)},
    ),
    "alternating": (
        language_model(LOCAL, ROTATED, count=3), (IDS,),
        {"decoder/layers_1/attention": (1, 0), "decoder/layers_2/attention": (0, 3)},
    ),
    "scan": (
        Encoder(3, EncoderBlock(BIASED, 24), scan=True), (X,),
        {"layers/attention": {0: (1, 3), 1: (0, 1), 2: (2, 3)}},
    ),
    "the same under scan": (
        Encoder(2, EncoderBlock(PLAIN.clone(scores=(scores.Alibi(),)), 24), scan=True), (X,),
        {"layers/attention": (1, 2)},
    ),
    "alternating under scan": (
        language_model(LOCAL, ROTATED, count=4, scan=True), (IDS,),
        {"decoder/layers/block_1/attention": {0: (1, 3), 1: (0, 2)}},
    ),
    "translator": (
        translator(**SHARED), (IDS, IDS),
        {
            "encoder/layers_0/attention": (1, 3), "encoder/layers_1/attention": (1, 3),
            "decoder/decoder/layers_0/attention": (0,),
            "decoder/decoder/layers_1/cross_attention": (0, 2),
        },
    ),
    "one source of kv_from stays": (
        Encoder(3, EncoderBlock(PLAIN, 24), kv_from=(None, 0, None)), (X,),
        {"layers_2/attention": (1,)},
    ),
    "classifier": (
        Classifier(TokenEmbedding(20, D), Encoder(1, EncoderBlock(PLAIN, 24)), 3), (IDS,),
        {"encoder/layers_0/attention": (1,)},
    ),
    "a user's module": (
        Pair((MLP(8), PLAIN, BIASED)), (X,), {"parts_1": (1,), "parts_2": (0, 3)}
    ),
}  # fmt: skip


@pytest.mark.sampled(0.05)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_heads_equals_one_that_reads_none(name: str) -> None:
    model, inputs, heads = MODELS[name]
    variables = drawn(model, *inputs)
    known = edits.names(model, variables, *inputs)
    assert all(f"{path}/attention_z" in known for path in heads)
    small, fewer = prune(model, variables, heads)
    shapes = jax.eval_shape(small.init, KEY, *inputs)
    assert jax.tree.map(jnp.shape, fewer) == jax.tree.map(jnp.shape, shapes)
    actual = jax.jit(small.apply)(fewer, *inputs)
    whole = jax.jit(model.apply)
    assert error(actual, whole(without(variables, heads), *inputs)) < 1e-5
    assert error(actual, whole(variables, *inputs)) > 1e-3


@pytest.mark.slow
def test_key_value_heads_are_repeated_alike_under_scan() -> None:
    """Layers keep 2 + 2 and 0 + 4 query heads, of pairs in both."""
    layer = MultiHeadAttention(8, num_kv_heads=2, head_dim=3)
    model = Encoder(2, EncoderBlock(layer, 8), scan=True)
    variables = drawn(model, X)
    heads = {"layers/attention": {0: (0, 1, 4, 7), 1: (0, 1, 2, 3)}}
    small, fewer = prune(model, variables, heads, repeat_kv=True)
    assert small.block.attention.num_kv_heads == 2
    assert error(small.apply(fewer, X), model.apply(without(variables, heads), X)) < 1e-5


@pytest.mark.sampled(0, slow=0.16)
def test_a_pruned_model_generates_and_is_saved() -> None:
    model, (tokens,), heads = MODELS["alternating"]
    variables = drawn(model, tokens)
    small, fewer = prune(model, variables, heads)
    empty = jax.tree.map(jnp.zeros_like, fewer)
    fewer = serialization.from_bytes(empty, serialization.to_bytes(fewer))
    actual = generate(small, fewer, tokens, max_new_tokens=5).tokens
    expected = generate(model, without(variables, heads), tokens, max_new_tokens=5).tokens
    np.testing.assert_array_equal(actual, expected)


def test_models_that_lose_nothing_stay_the_same() -> None:
    model, inputs, _ = MODELS["alternating"]
    variables = drawn(model, *inputs)
    same, parameters = prune(model, variables, {})
    assert same is model
    jax.tree.map(np.testing.assert_array_equal, parameters, variables)


@pytest.mark.sampled(0.13, slow=0.2)
def test_layers_that_fill_no_step_of_a_scan_lose_heads() -> None:
    """The pruned stack has fewer blocks, which its layers would fill, so it has no scan."""
    model = Encoder(1, (EncoderBlock(PLAIN, 8), EncoderBlock(LOCAL, 8)), scan=True)
    variables, heads = drawn(model, X), {"layers_0/attention": (1,)}
    small, fewer = prune(model, variables, heads)
    assert error(small.apply(fewer, X), model.apply(without(variables, heads), X)) < 1e-5


class Kerple(scores.ScoreMod):
    """A user's score with arrays of each head."""

    a: Any

    def __call__(self, score: jax.Array, at: At) -> jax.Array:
        return score - self.a[at.head] * jnp.log1p(jnp.abs(at.q - at.k))


def in_scan(layer: Any, count: int = 2, **fields: Any) -> Encoder:
    return Encoder(count, (EncoderBlock(layer, 8),) * fields.pop("size", 1), scan=True, **fields)


def tied(layer: Any) -> Encoder:
    return Encoder(2, EncoderBlock(layer, 8), kv_from=(None, 0))


REFUSED: list[tuple[Any, Any, str]] = [
    (PLAIN, (1,), "heads must be a dict of indices by path, got (1,) of tuple"),
    (PLAIN, {"": 1}, "heads of the layer must be a tuple of sizes, got 1 of int"),
    (PLAIN, {"": ("1",)}, "heads of the layer must be an int, got '1'"),
    (PLAIN, {"": (4,)}, "must be in 0 … 3, and layers in 0 … 0, got heads [4] of"),
    (PLAIN, {"": (-1,)}, "heads of the layer must be in 0"),
    (PLAIN, {"": range(4)}, "must be a tuple of sizes"),
    (PLAIN, {"": (0, 1, 2, 3)}, "the layer must keep a head, and as many in each"),
    (PLAIN, {"": {1: (0,)}}, "and layers in 0 … 0, got heads [0] of layer 1"),
    (PLAIN, {"attention": (0,)}, "got ['attention']; for 'attention' give '' (of 1)"),
    (MLP(8), {"": (0,)}, "layers in the model's fields, got ['']; for '' there are none"),
    (ROTATED, {"": (0,)}, "as many query heads each, or none, got [1, 2]; give repeat_kv"),
    (PLAIN.clone(project_out=False), {"": (0,)}, "must have project_out=True"),
    (variants.TalkingHeadsAttention(N), {"": (0,)}, "not mix its heads, as TalkingHeadsAttention"),
    (MultiHeadAttention(N, qk_norm=QKNorm(over_heads=True)), {"": (0,)}, "not mix its heads"),
    (PLAIN.clone(capture=Capture(("z",), heads=(1,))), {"": (0,)}, "capture all heads, got (1,)"),
    (
        PLAIN.clone(scores=(Kerple(np.ones(N, np.float32)),)), {"": (0,)},
        "must be of flax_mha, got Kerple",
    ),
    (
        in_scan(PLAIN), {"layers/attention": {0: (1,)}},
        "as many in each layer under scan, got [3, 4]; remove fewer, or unstack",
    ),
    (in_scan(PLAIN, size=2, count=3), {"layers/block_0/attention": (1,)}, "fill the steps of its"),
    (
        in_scan(PLAIN.clone(scores=(scores.Alibi(),))), {"layers/attention": {0: (1,), 1: (2,)}},
        "layers that share Alibi in layers/attention must lose the same heads",
    ),
    (
        Encoder(2, EncoderBlock(PLAIN, 8), **SHARED), {"layers_0/attention": (1,)},
        "layers that share relative_bias in the stack must lose the same heads",
    ),
    (
        Encoder(2, EncoderBlock(PLAIN, 8), scores=(scores.Alibi(),)),
        {"layers_0/attention": (1,), "layers_1/attention": (2,)}, "layers that share Alibi in the",
    ),
    (tied(PLAIN), {"layers_0/attention": (1,)}, "must keep the keys and values that others read"),
    (tied(PLAIN), {"layers_1/attention": (1,)}, "must have parameters for ['key', 'value'], got"),
]  # fmt: skip


def test_refusals_have_their_reason() -> None:
    for model, heads, message in REFUSED:
        variables = drawn(model, X)
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            prune(model, variables, heads)


def test_variables_of_a_pruned_layer_are_its_parameters_alone() -> None:
    variables = drawn(PLAIN, X)
    with pytest.raises(ValueError, match="variables must have no 'cache' of pruned layers"):
        prune(PLAIN, {**variables, "cache": {"kv": 0}}, {"": (1,)})
    changed = edits.attach(PLAIN, variables, {"attention_z": edits.Edit(keep=0.0)}, X)
    with pytest.raises(ValueError, match="variables must have no 'edits'"):
        prune(PLAIN, changed, {"": (1,)})
    extra = {"params": {**variables["params"], "lora": {"a": np.ones((D, 2))}}}
    with pytest.raises(ValueError, match=re.escape("alone, got ['lora/a'] too")):
        prune(PLAIN, extra, {"": (1,)})
