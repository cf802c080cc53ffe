"""The `attention_mask` of tokenizers in models and `generate`: left, right, between, refused."""

import functools
from typing import Any

import flax.nnx
import jax
import jax.numpy as jnp
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
    Translator,
    generate,
    masks,
    nnx,
)
from flax_mha.interop.bert import Bert
from flax_mha.models import PositionEmbedding, TokenEmbedding
from flax_mha.positions import DynamicNtk, Rotary
from tests.support.arrays import random_variables

V, D, NEW = 13, 8, 4
TEXTS = [[3, 1, 4, 1, 5], [9, 2]]
REAL = {
    "left": [[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]], "right": [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]],
    "both ends": [[1, 1, 1, 1, 1], [0, 1, 1, 0, 0]], "between": [[1, 1, 1, 1, 1], [1, 0, 0, 1, 0]],
}  # fmt: skip
SIDES = ["left", *(pytest.param(side, marks=pytest.mark.slow) for side in REAL if side != "left")]


def padded(side: str, padding: int = 7) -> tuple[np.ndarray, np.ndarray]:
    """Return the texts as ids [2, 5], and their mask as a tokenizer gives it."""
    mask = np.array(REAL[side])
    ids = np.full(mask.shape, padding)
    for row, real, text in zip(ids, mask, TEXTS, strict=True):
        row[real == 1] = text
    return ids, mask


def decoder(rotary: Rotary | None = None, **fields: Any) -> LanguageModel:
    """Return a model that rotates, or with a learned table of positions."""
    block = DecoderBlock(MultiHeadAttention(2, rotary=rotary), 8, norm="rmsnorm")
    return LanguageModel(TokenEmbedding(V, D), Decoder(1, block), tied=False, **fields)


# The last grows with each text's length.
ROTARIES = {"rotary": Rotary(), "growing": Rotary(scaling=DynamicNtk(4.0, 1))}
MODELS = {
    "learned": decoder(position_embedding=PositionEmbedding(max_length=16)),
    **{kind: decoder(rotary) for kind, rotary in ROTARIES.items()},
}


def translator(kind: str) -> Translator:
    layer, rotary = MultiHeadAttention(2), ROTARIES.get(kind)
    block = DecoderBlock(layer, 8, cross_attention=layer.copy())
    embedding = PositionEmbedding(max_length=16)
    inner = LanguageModel(TokenEmbedding(V, D), Decoder(1, block), position_embedding=embedding)
    return Translator(Encoder(1, EncoderBlock(MultiHeadAttention(2, rotary=rotary), 8)), inner)


@functools.cache
def alone(kind: str) -> tuple[Any, Any, Any, Any]:
    """Return variables, and of each text alone its new tokens, logits, and the gradient."""
    model, ids = MODELS[kind], np.zeros((2, 5), int)
    given = random_variables(model, ids)
    each = [np.array([text]) for text in TEXTS]
    tokens = [generate(model, given, text, max_new_tokens=NEW).tokens[0] for text in each]
    assert len({*(tuple(row.tolist()) for row in tokens)}) > 1

    @jax.jit
    def loss(given: Any) -> Any:
        rows = [model.apply(given, text)[0] for text in each]
        pairs = zip(rows, COTANGENTS, strict=True)
        return sum(jnp.vdot(row, cotangent) for row, cotangent in pairs), rows

    grads, rows = jax.grad(loss, has_aux=True)(given)
    return given, np.stack(tokens), rows, grads


COTANGENTS = [
    np.random.default_rng(i).normal(size=(len(text), V)).astype(np.float32)
    for i, text in enumerate(TEXTS)
]


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("side", SIDES)
def test_padded_prompts_generate_as_alone(side: str, kind: str) -> None:
    """With static and traced masks, and ids of padding beyond the vocabulary."""
    model, (ids, mask), (given, wanted, *_) = MODELS[kind], padded(side, V + 100), alone(kind)
    call = functools.partial(generate, model, given, max_new_tokens=NEW)
    np.testing.assert_array_equal(call(ids, attention_mask=mask).tokens, wanted)
    traced = jax.jit(lambda mask: call(ids, attention_mask=mask).tokens)
    np.testing.assert_array_equal(traced(mask == 1), wanted)


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("side", SIDES)
def test_padded_texts_have_the_logits_of_each_alone(side: str, kind: str) -> None:
    """Outputs and gradients of parameters, with a static mask and a traced one."""
    model, (ids, mask), (given, _, rows, grads) = MODELS[kind], padded(side, V + 100), alone(kind)
    cotangents = np.zeros((2, 5, V), np.float32)
    cotangents[mask == 1] = np.concatenate(COTANGENTS)

    def loss(given: Any, mask: Any) -> Any:
        logits = model.apply(given, ids, attention_mask=mask)
        return jnp.vdot(logits, cotangents), logits

    run = jax.grad(loss, has_aux=True)
    for found, logits in jax.jit(lambda given, traced: [run(given, m) for m in (mask, traced)])(
        given, mask
    ):
        np.testing.assert_allclose(logits[mask == 1], np.concatenate(rows), rtol=1e-4, atol=1e-4)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3)
        jax.tree.map(close, found, grads)


def encoder() -> Encoder:
    return Encoder(1, EncoderBlock(MultiHeadAttention(2), 8))


READERS = {
    "language model": MODELS["rotary"],
    "classifier": Classifier(TokenEmbedding(V, D), encoder(), None, positions="sinusoidal"),
    "translator": translator("rotary"),
    "BERT": Bert(
        TokenEmbedding(V, D), TokenEmbedding(2, D), PositionEmbedding(max_length=8), encoder()
    ),
}


@pytest.mark.sampled(0.15)
@pytest.mark.parametrize("name", READERS)
def test_lengths_hide_ids_beyond_the_vocabulary(name: str) -> None:
    """Labels, for example, are padded with −100."""
    model, ids = READERS[name], np.array([[3, 1, 4, -100, V + 100]])
    target = (ids[:, :2],) if name == "translator" else ()
    of_padding = "source_lengths" if target else "lengths"

    def run(given: Any, count: int, width: int = 5) -> Any:
        return model.apply(given, ids[:, :width], *target, **{of_padding: np.array([count])})

    given = random_variables(model, ids * 0, *target)
    found, wanted = jax.jit(lambda given: (run(given, 3), run(given, 3, 3)))(given)
    np.testing.assert_allclose(found[:, : wanted.shape[1]], wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="tokens must be in 0 … 12, got -100"):
        run(given, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("side", REAL)
def test_padded_sources_translate_as_alone(side: str, kind: str) -> None:
    model, (ids, mask) = translator(kind), padded(side, V + 100)
    target = np.array([[1, 2, 3]] * 2)
    given = random_variables(model, ids % V, target)
    wanted = [jax.jit(model.apply)(given, np.array([x]), target[:1])[0] for x in TEXTS]
    static = jax.jit(lambda given: model.apply(given, ids, target, attention_mask=mask))(given)
    np.testing.assert_allclose(static, np.stack(wanted), rtol=1e-4, atol=1e-4)
    traced = jax.jit(model.apply)(given, ids, target, attention_mask=mask)
    np.testing.assert_allclose(traced, np.stack(wanted), rtol=1e-4, atol=1e-4)
    call: Any = {"start": 1, "max_new_tokens": NEW}
    tokens = [generate(model, given, np.array([text]), **call).tokens[0] for text in TEXTS]
    found = generate(model, given, ids, attention_mask=mask, **call)
    np.testing.assert_array_equal(found.tokens, np.stack(tokens))


@pytest.mark.slow
def test_mask_joins_that_of_the_call() -> None:
    model, (ids, mask) = MODELS["rotary"], padded("left")
    given, near = random_variables(model, ids), masks.Window(1, 0)
    found = model.apply(given, ids, attention_mask=mask, mask=near)
    wanted = model.apply(given, np.array([TEXTS[1]]), mask=near)
    np.testing.assert_allclose(found[1, 3:], wanted[0], atol=1e-5)


IDS, MASK = padded("left")
EMPTY = MASK * np.array([[1], [0]])
LAYER = MultiHeadAttention(2)
DECODING = DecoderBlock(LAYER.clone(decode=True), 8)
X = np.ones((2, 5, D), np.float32)


def called(model: Any, *inputs: Any, **call: Any) -> Any:
    return jax.eval_shape(functools.partial(model.init, **call), jax.random.key(0), *inputs)


def generated(mask: Any = MASK, **call: Any) -> Any:
    return generate(MODELS["rotary"], None, IDS, attention_mask=mask, max_new_tokens=1, **call)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    **{
        f"{name} {words}": (functools.partial(call, mask), error, words)
        for name, call in (
            ("generate", generated),
            ("model", lambda mask: called(MODELS["rotary"], IDS, attention_mask=mask)),
        )
        for mask, error, words in (
            (MASK[:1], ValueError, "attention_mask must have shape the tokens' shape = \\(2, 5\\)"),
            (MASK * 2, ValueError, "attention_mask must be in 0 … 1, got 2; give 1 for tokens"),
            (MASK.astype(float), TypeError, "attention_mask must be integers, got float64"),
        )
    },
    "no token": (lambda: generated(EMPTY), ValueError, "lengths must be in 1 … 5, got 0"),
    "lengths": (lambda: generated(lengths=np.array([5, 2])), ValueError,
                "at most one of lengths and attention_mask"),
    "order": (lambda: called(MODELS["rotary"], IDS, attention_mask=MASK, order=np.arange(5)),
              ValueError, "attention_mask must be None with order, got both"),
    "decoding": (lambda: called(MODELS["rotary"].clone(decoder=Decoder(1, DECODING)), IDS,
                                attention_mask=MASK),
                 ValueError, r"must be None in decoding.*call flax_mha\.generate"),
    **{
        name: (call, TypeError, r"give lengths, or mask=masks\.Keys\(attention_mask != 0\)")
        for name, call in {
            "layer": lambda: called(LAYER, X, attention_mask=MASK),
            "classifier": lambda: called(READERS["classifier"], IDS, attention_mask=MASK),
            "nnx": lambda: nnx.MultiHeadAttention(2, D, rngs=flax.nnx.Rngs(0))(
                X, attention_mask=MASK
            ),
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_masks_that_cannot_be_read_raise(name: str) -> None:
    call, error, words = WRONG[name]
    with pytest.raises(error, match=words):
        call()
