"""Models without some heads have the outputs and gradients of models that mask them."""

import re
import tempfile
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, serialization
from flax.traverse_util import flatten_dict, unflatten_dict

import flax_mha.nnx
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
from flax_mha.models import MLP, Classifier, TokenEmbedding, Translator
from flax_mha.positions import Rotary
from tests.support.decoding import decoded
from tests.support.oracle import error, random_like

N, D, T = 4, 16, 6
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, T, D)).astype(np.float32)
IDS = RNG.integers(0, 20, (2, T))
KEY = jax.random.key(0)
PER_HEAD = masks.PerHead([masks.Window(1), masks.Window(2), masks.Causal(), masks.Dilated(2)])
TABLE = RNG.random((1, N, T, T)) < 0.7


def by_head(row: Any, head: Any, i: Any, j: Any) -> Any:
    return (i - j) % (head + 2) != 1


def slope(score: Any, row: Any, head: Any, i: Any, j: Any) -> Any:
    return score + 0.1 * head * (i - j)


LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "standard": (MultiHeadAttention(N), (1, 3)),
    "qkv_features": (MultiHeadAttention(N, qkv_features=12, v_head_dim=5), (0, 1, 3)),
    "no biases": (MultiHeadAttention(N, use_bias=False, rotary=Rotary()), (2,)),
    "boxed": (MultiHeadAttention(N, partitioned=True), (2,)),
    "one of each group": (MultiHeadAttention(N, num_kv_heads=2, rotary=Rotary()), (1, 2)),
    "a whole group": (MultiHeadAttention(N, num_kv_heads=2, gate="head"), (0, 1)),
    "everything": (
        MultiHeadAttention(
            N, num_kv_heads=2, head_dim=6, sinks=True, scale="learned", gate="feature",
            qk_norm=QKNorm(), rotary=Rotary(), mask=masks.Causal(),
        ), (0, 3),
    ),
    "one mask of all heads": (MultiHeadAttention(N, mask=TABLE[:, :1]), (0, 2)),
    "masks": (
        MultiHeadAttention(
            N, mask=(masks.Causal() & PER_HEAD & ~masks.Predicate(by_head)) | masks.Dense(TABLE)
        ), (0, 2),
    ),
    "learned scores": (
        MultiHeadAttention(
            N, scores=(scores.RelativeBias(), scores.SoftCap(5.0), scores.RelativeBias(),
            scores.Relative(per_head=True, max_distance=3), scores.TransformerXL()),
        ), (0, 2),
    ),
    "given scores": (
        MultiHeadAttention(
            N, scores=(scores.Alibi(), scores.Bias(RNG.normal(size=(N, 1, T))),
            scores.Relative(RNG.normal(size=(5, 4))), scores.Score(slope)),
        ), (0, 2),
    ),
    "latent": (
        variants.MultiHeadLatentAttention(
            N, head_dim=4, kv_rank=7, rope_dim=4, q_rank=9, rotary=Rotary(), mask=masks.Causal()
        ), (0, 2),
    ),
    "latent without q_rank": (
        variants.MultiHeadLatentAttention(N, kv_rank=7, rope_dim=4, rotary=Rotary()), (3,)
    ),
    "differential": (variants.DifferentialAttention(N, mask=masks.Causal()), (0, 2)),
    "differential groups": (variants.DifferentialAttention(N, num_kv_heads=2), (0, 2)),
    "forgetting": (variants.ForgettingAttention(N, num_kv_heads=2, sinks=True), (1, 2)),
    "chosen blocks": (variants.ChosenBlocksAttention(N, block=2, count=2), (0, 2)),
}  # fmt: skip
REPEATED: dict[str, tuple[Any, tuple[int, ...]]] = {
    "repeated": (MultiHeadAttention(N, num_kv_heads=2, sinks=True, qk_norm=QKNorm()), (1,)),
    "repeated in pairs": (MultiHeadAttention(8, num_kv_heads=2, head_dim=3), (1, 3)),
    "differential repeated": (variants.DifferentialAttention(N, num_kv_heads=2), (0,)),
}


def drawn(module: Any, *inputs: Any) -> Any:
    """Return random parameters, boxed where the module boxes them."""
    shapes = jax.eval_shape(module.init, KEY, *inputs)
    values = random_like(nn.unbox({"params": shapes["params"]}))
    return nn.meta.replace_boxed({"params": shapes["params"]}, values)


def size(tree: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


def check_layer(layer: Any, removed: tuple[int, ...], repeat_kv: bool = False) -> None:
    """Check output and gradients, those of all parameters of the larger layer."""
    variables = drawn(layer, X)
    keep = np.ones(layer.num_heads, np.float32)
    keep[list(removed)] = 0

    def masked(variables: Any, x: Any) -> jax.Array:
        return layer.apply(variables, x, head_mask=keep)

    def pruned(variables: Any, x: Any) -> jax.Array:
        small, fewer = prune(layer, variables, {"": removed}, repeat_kv=repeat_kv)
        return small.apply(fewer, x)

    def both(apply: Any) -> Any:
        def loss(*args: Any) -> Any:
            out = apply(*args)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(variables, X)

    small, fewer = prune(layer, variables, {"": removed}, repeat_kv=repeat_kv)
    shapes = jax.eval_shape(small.init, KEY, X)
    assert jax.tree.map(jnp.shape, fewer) == jax.tree.map(jnp.shape, shapes)
    assert small.num_heads == layer.num_heads - len(removed)
    assert repeat_kv or size(fewer) < size(variables)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        both(pruned), both(masked),
    )  # fmt: skip
    assert error(masked(variables, X), layer.apply(variables, X)) > 1e-2


@pytest.mark.sampled(0.15)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_without_heads_equals_one_that_masks_them(name: str) -> None:
    check_layer(*LAYERS[name])


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("name", REPEATED)
def test_keys_and_values_are_repeated_for_uneven_groups(name: str) -> None:
    check_layer(*REPEATED[name], repeat_kv=True)


def test_only_as_many_keys_and_values_are_repeated_as_needed() -> None:
    layer, removed = REPEATED["repeated in pairs"]
    small, _ = prune(layer, drawn(layer, X), {"": removed}, repeat_kv=True)
    assert (small.num_heads, small.num_kv_heads) == (6, 3)


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


@pytest.mark.sampled(0.3)
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


def test_key_value_heads_are_repeated_alike_under_scan() -> None:
    """Layers keep 2 + 2 and 0 + 4 query heads, of pairs in both."""
    layer = MultiHeadAttention(8, num_kv_heads=2, head_dim=3)
    model = Encoder(2, EncoderBlock(layer, 8), scan=True)
    variables = drawn(model, X)
    heads = {"layers/attention": {0: (0, 1, 4, 7), 1: (0, 1, 2, 3)}}
    small, fewer = prune(model, variables, heads, repeat_kv=True)
    assert small.block.attention.num_kv_heads == 2
    assert error(small.apply(fewer, X), model.apply(without(variables, heads), X)) < 1e-5


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("name", ["everything", "latent", "forgetting", "differential groups"])
def test_a_pruned_layer_decodes(name: str) -> None:
    layer, removed = LAYERS[name]
    layer = layer.clone(mask=masks.Causal())
    small, fewer = prune(layer, drawn(layer, X), {"": removed})
    steps = decoded(small.clone(decode=True), fewer, X, (3, 1, 2))
    assert error(steps, small.apply(fewer, X)) < 1e-5


@pytest.mark.slow
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


class TwoLayers(nnx.Module):
    """A user's module of nnx."""

    def __init__(self, **fields: Any) -> None:
        self.layers = nnx.List(
            flax_mha.nnx.MultiHeadAttention(N, D, rngs=nnx.Rngs(i), **fields) for i in range(2)
        )

    def __call__(self, x: jax.Array, head_mask: Any = (None, None)) -> jax.Array:
        for layer, mask in zip(self.layers, head_mask, strict=True):
            x = layer(x, head_mask=mask)
        return x


def randomize(module: nnx.Module) -> None:
    nnx.update(module, nnx.State(random_like(nnx.to_pure_dict(nnx.state(module, nnx.Param)))))


def test_nnx_layers_lose_heads() -> None:
    model = TwoLayers(
        num_kv_heads=2, sinks=True, scale="learned", gate="feature", qk_norm=QKNorm(),
        scores=(scores.RelativeBias(), scores.Alibi()), mask=masks.Causal() & PER_HEAD,
    )  # fmt: skip
    randomize(model)
    small = prune(model, {"layers/0": (1, 3), "layers/1": (0,)}, repeat_kv=True)
    keep = (jnp.array([1.0, 0, 1, 0]), jnp.array([0.0, 1, 1, 1]))
    assert error(small(X), model(X, keep)) < 1e-5
    assert error(small(X), model(X)) > 1e-2
    assert size(nnx.state(small)) < size(nnx.state(model))
    assert small.layers[0].query.out_features == (2, D // N)
    layer = small.layers[0]
    layer.init_cache(X.shape)
    steps = [layer(X[:, i : i + 1], decode=True) for i in range(T)]
    assert error(jnp.concatenate(steps, 1), layer(X)) < 1e-5
    with pytest.raises(ValueError, match="no cache and no edits"):
        prune(small, {"layers/0": (1,)})


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("MultiHeadLatentAttention", {"kv_rank": 6, "rope_dim": 2, "rotary": Rotary()}),
        ("DifferentialAttention", {"num_kv_heads": 2}),
        ("ForgettingAttention", {"num_kv_heads": 2}),
        ("ChosenBlocksAttention", {"block": 2, "count": 2}),
    ],
)
def test_nnx_variants_lose_heads(kind: str, fields: Any) -> None:
    layer = getattr(flax_mha.nnx, kind)(N, D, rngs=nnx.Rngs(0), **fields)
    randomize(layer)
    small = prune(layer, {"": (1, 3)})
    assert error(small(X), layer(X, head_mask=jnp.array([1.0, 0, 1, 0]))) < 1e-5
    assert error(small(X), layer(X)) > 1e-2


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
    (PLAIN, {"": (4,)}, "heads of the layer must be in 0 … 3, got [4]"),
    (PLAIN, {"": (-1,)}, "heads of the layer must be in 0"),
    (PLAIN, {"": range(4)}, "must be a tuple of sizes"),
    (PLAIN, {"": (0, 1, 2, 3)}, "the layer must keep one of its 4 heads, got all to remove"),
    (PLAIN, {"": {1: (0,)}}, "heads of the layer must be by layers 0 … 0, got [1]"),
    (PLAIN, {"attention": (0,)}, "got ['attention']; give some of\n  ''"),
    (MLP(8), {"": (0,)}, "attention layers in the model's fields, got ['']; give some of\n  none"),
    (ROTATED, {"": (0,)}, "must keep as many query heads each, or none, got [1, 2]; give repeat_kv"),
    (PLAIN.clone(project_out=False), {"": (0,)}, "must have project_out=True"),
    (variants.TalkingHeadsAttention(N), {"": (0,)}, "not mix its heads, as TalkingHeadsAttention"),
    (
        variants.ChosenBlocksAttention(N, num_kv_heads=2, share=True), {"": (0, 1)},
        "must not mix its heads, as ChosenBlocksAttention does",
    ),
    (PLAIN.clone(capture=Capture(("z",), heads=(1,))), {"": (0,)}, "capture all heads, got (1,)"),
    (
        PLAIN.clone(scores=(Kerple(np.ones(N, np.float32)),)), {"": (0,)},
        "must be of flax_mha, got Kerple",
    ),
    (
        in_scan(PLAIN), {"layers/attention": {0: (1,)}},
        "as many heads in each layer under scan, got [3, 4]; remove as many from each, or unstack",
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
