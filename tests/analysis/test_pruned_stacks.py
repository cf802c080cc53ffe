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
    generate,
    masks,
    scores,
    variants,
)
from flax_mha.analysis import prune
from flax_mha.base.coordinates import At
from flax_mha.models import TokenEmbedding, Translator
from flax_mha.models.feed_forward import MLP
from flax_mha.positions import Rotary
from tests.analysis.pruning_cases import IDS, KEY, D, N, X, drawn
from tests.support.oracle import error


def without(variables: Any, heads: Any) -> Any:
    """Return variables whose output projections read nothing of the heads."""
    flat = flatten_dict(nn.unbox(variables)["params"])
    for path, removed in heads.items():
        name, step = (*path.split("/"), "out", "kernel"), ...
        if name not in flat:  # Stacked by a scan.
            before, number, after = re.fullmatch("(.*)layers_([0-9]+)/(.*)", path).groups()
            size = len({part for x in flat for part in x if part.startswith("block_")})
            step, block = divmod(int(number), size or 1)
            name = f"{before}layers/{f'block_{block}/' if size else ''}{after}/out/kernel"
            name = tuple(name.split("/"))
        flat[name] = np.array(flat[name])
        flat[name][step][..., list(removed), :, :] = 0
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
    "alternating": (
        language_model(LOCAL, ROTATED, count=3), (IDS,),
        {"decoder/layers_1/attention": (1, 0), "decoder/layers_2/attention": (0, 3)},
    ),
    "scan": (
        Encoder(3, EncoderBlock(BIASED.clone(partitioned=True), 24), scan=True), (X,),
        {"layers_0/attention": (1, 3), "layers_2/attention": (0, 1, 3)},
    ),
    "the same under scan": (
        Encoder(2, EncoderBlock(PLAIN.clone(scores=(scores.Alibi(),)), 24), scan=True), (X,),
        {"layers_0/attention": (1, 2), "layers_1/attention": (1, 2)},
    ),
    "alternating under scan": (
        language_model(LOCAL, ROTATED, count=5, scan=True), (IDS,),
        {"decoder/layers_1/attention": (1, 3), "decoder/layers_4/attention": (0, 3)},
    ),
    "a scan that loses none": (
        translator(scan=True), (IDS, IDS), {"decoder/decoder/layers_0/attention": (0,)},
    ),
    "shared scores": (
        Encoder(3, EncoderBlock(BIASED, 24), scan=True, scores=(*SHARED["scores"], scores.Alibi())),
        (X,), {"layers_0/attention": (1, 3), "layers_2/attention": (0,)},
    ),
    "translator": (
        translator(**SHARED), (IDS, IDS),
        {
            "encoder/layers_0/attention": (1, 3), "encoder/layers_1/attention": (1, 3),
            "decoder/decoder/layers_0/attention": (0,),
            "decoder/decoder/layers_1/cross_attention": (0, 2),
        },
    ),
    "a user's module": (
        Pair((MLP(8), PLAIN, BIASED)), (X,), {"parts_1": (1,), "parts_2": (0, 3)}
    ),
}  # fmt: skip


@pytest.mark.sampled(0.06)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_heads_equals_one_that_reads_none(name: str) -> None:
    model, inputs, heads = MODELS[name]
    variables = drawn(model, *inputs)
    small, fewer = prune(model, variables, heads)
    shapes = jax.eval_shape(small.init, KEY, *inputs)
    assert jax.tree.map(jnp.shape, fewer) == jax.tree.map(jnp.shape, shapes)
    actual = jax.jit(small.apply)(fewer, *inputs)
    whole = jax.jit(model.apply)
    assert error(actual, whole(without(variables, heads), *inputs)) < 1e-5
    assert error(actual, whole(variables, *inputs)) > 1e-3


@pytest.mark.sampled(0)
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
    assert same == model
    jax.tree.map(np.testing.assert_array_equal, parameters, variables)


class Kerple(scores.ScoreMod):
    """A user's score with arrays of each head."""

    a: Any

    def __call__(self, score: jax.Array, at: At) -> jax.Array:
        return score - self.a[at.head] * jnp.log1p(jnp.abs(at.q - at.k))


def tied(layer: Any) -> Encoder:
    return Encoder(2, EncoderBlock(layer, 8), kv_from=(None, 0))


REFUSED: list[tuple[Any, Any, str]] = [
    (PLAIN, {"": (0, 1, 2, 3)}, "as many query heads each, or none, got []; keep a head"),
    (PLAIN, {"attention": (0,)}, "got 'attention'; give '' (of 1)"),
    (MLP(8), {"": (0,)}, "layers in the model's fields, got ''; there are none"),
    (ROTATED, {"": (0,)}, "as many query heads each, or none, got [1, 2]; keep a head"),
    (PLAIN.clone(project_out=False), {"": (0,)}, "must have project_out=True"),
    (variants.TalkingHeadsAttention(N), {"": (0,)}, "not mix them nor capture"),
    (MultiHeadAttention(N, qk_norm=QKNorm(over_heads=True)), {"": (0,)}, "not mix them"),
    (PLAIN.clone(capture=Capture(("z",), heads=(1,))), {"": (0,)}, "nor capture some of them"),
    (
        PLAIN.clone(scores=(Kerple(np.ones(N, np.float32)),)), {"": (0,)},
        "masks and scores whose heads are known, got Kerple",
    ),
    (tied(PLAIN), {"layers_0/attention": (1,)}, "must share no keys to lose heads, got kv"),
    (PLAIN.clone(mask=masks.PerHead([masks.Causal()] * N)), {"": (0,)}, "known, got PerHead"),
    (PLAIN.clone(scores=(scores.TransformerXL(),)), {"": (0,)}, "known, got TransformerXL"),
]  # fmt: skip


def test_refusals_have_their_reason() -> None:
    for model, heads, message in REFUSED:
        variables = drawn(model, X)
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            prune(model, variables, heads)


def test_other_parameters_and_missing_heads_are_refused() -> None:
    own = drawn(PLAIN, X)
    extra = {"params": {**own["params"], "lora": {"a": np.ones((D, 2))}}}
    with pytest.raises(ValueError, match=r"of its class and no others, got .*'lora'"):
        prune(PLAIN, extra, {"": (1,)})
    for heads in ((4,), (-5,), ("1",)):
        with pytest.raises(IndexError):
            prune(PLAIN, own, {"": heads})
