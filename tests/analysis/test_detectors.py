"""Detectors of heads: mean weights on pairs against NumPy, and heads made by hand."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_mha.nnx
from flax_mha import (
    Capture,
    Decoder,
    DecoderBlock,
    LanguageModel,
    MultiHeadAttention,
    analysis,
    edits,
    masks,
    models,
    positions,
    scores,
    variants,
)  # fmt: skip
from tests.support import oracle
from tests.support.arrays import random_variables
from tests.support.meshes import KINDS, on

B, T, D, N, V = 2, 10, 8, 4, 8
TOKENS = np.random.default_rng(0).integers(0, 5, (B, T))
NAMES = ("previous", "first", "duplicate", "induction")
LAYER = MultiHeadAttention(N, num_kv_heads=2, rotary=positions.Rotary())
LAYERS: dict[str, tuple[MultiHeadAttention, dict[str, Any]]] = {
    "grouped heads that rotate": (LAYER, {}),
    "a soft cap and sinks": (LAYER.clone(scores=(scores.SoftCap(2.0),), sinks=True), {}),
    "ALiBi in a window": (LAYER.clone(scores=(scores.Alibi(),), mask=masks.Window(4, 0)), {}),
    "a table of T5": (LAYER.clone(scores=(scores.RelativeBias(),), normalize_qk=True), {}),
    "padding": (LAYER.clone(use_bias=False), {"lengths": np.array([7, 10])}),
}


def language_model(layer: MultiHeadAttention, scan: bool = False) -> LanguageModel:
    decoder = Decoder(2, DecoderBlock(layer, mlp_dim=8), scan=scan)
    return LanguageModel(models.TokenEmbedding(V, D), decoder)


def detect(model: nn.Module, values: Any, tokens: Any, **options: Any) -> Any:
    call = functools.partial(analysis.detect, model, **options)
    return jax.jit(call)(values, jnp.asarray(tokens))


def softmax(s: np.ndarray, allowed: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    """Return the weights of scores [N, T, S]."""
    e = np.where(allowed, np.exp(oracle.float64(s)), 0)
    total = e.sum(-1, keepdims=True)
    total = total if sinks is None else total + np.exp(oracle.float64(sinks))[:, None, None]
    return np.divide(e, total, out=np.zeros_like(e), where=total > 0)


def is_pair(name: str, tokens: np.ndarray, i: int, j: int) -> bool:
    if name == "previous":
        return j == i - 1
    if name == "first":
        return j == 0 < i
    if name == "duplicate":
        return j < i and tokens[i] == tokens[j]
    return 0 < j <= i and tokens[j - 1] == tokens[i]


def mean_weight(name: str, weights: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Return the score [N] of weights [B, N, T, T], for queries that see such a key [B, T, T]."""
    taken = []
    for row, tokens in enumerate(TOKENS):
        for i in range(T):
            keys = [j for j in range(T) if allowed[row, i, j] and is_pair(name, tokens, i, j)]
            if keys:
                taken.append(weights[row][:, i, keys].sum(-1))
    return np.mean(taken, axis=0)


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize(
    "case", [x if "sinks" in x else pytest.param(x, marks=pytest.mark.slow) for x in LAYERS]
)
def test_scores_are_mean_weights_on_the_pairs(case: str) -> None:
    layer, options = LAYERS[case]
    model = language_model(layer)
    values = random_variables(model, TOKENS)
    detected = detect(model, values, TOKENS, **options)
    watched = analysis.watch(model, Capture(("scores",)))
    run = jax.jit(functools.partial(watched.apply, mutable="intermediates"))
    _, sown = run(values, TOKENS, **options)
    window = layer.mask.left if layer.mask is not None else T
    i, j = np.arange(T)[:, None], np.arange(T)
    real = options.get("lengths", np.array([T, T]))[:, None, None]
    allowed = (j <= i) & (j >= i - window) & (j < real) & (i < real)
    assert {*detected} == {f"decoder/layers_{n}/attention" for n in range(2)}
    for n in range(2):
        s = sown["intermediates"]["decoder"][f"layers_{n}"]["attention"]["attention_scores"][0]
        sinks = values["params"]["decoder"][f"layers_{n}"]["attention"].get("sinks")
        weights = np.stack([softmax(s[row], allowed[row], sinks) for row in range(B)])
        found = detected[f"decoder/layers_{n}/attention"]
        assert {*found} == {*NAMES}
        for name in NAMES:
            want = mean_weight(name, weights, allowed)
            np.testing.assert_allclose(found[name], want, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_scanned_layers_have_the_scores_of_separate_ones() -> None:
    plain, scanned = language_model(LAYER), language_model(LAYER, scan=True)
    values = random_variables(scanned, TOKENS)
    stacked = values["params"]["decoder"].pop("layers")
    separate = {f"layers_{n}": jax.tree.map(lambda x, n=n: x[n], stacked) for n in range(2)}
    other = {"params": {**values["params"], "decoder": values["params"]["decoder"] | separate}}
    values["params"]["decoder"]["layers"] = stacked
    found = detect(scanned, values, TOKENS)["decoder/layers/attention"]
    want = detect(plain, other, TOKENS)
    for n in range(2):
        for name, score in want[f"decoder/layers_{n}/attention"].items():
            np.testing.assert_allclose(found[name][n], score, rtol=1e-5)


class Twice(nnx.Module):
    """One nnx layer that is called twice."""

    def __init__(self) -> None:
        self.embedding = nnx.Embed(V, D, rngs=nnx.Rngs(0))
        self.layer = flax_mha.nnx.MultiHeadAttention(
            N, D, mask=masks.Causal(), bias_init=nn.initializers.normal(), rngs=nnx.Rngs(1)
        )

    def __call__(self, tokens: Any) -> jax.Array:
        return self.layer(self.layer(self.embedding(tokens)))


@pytest.mark.sampled(0.12)
def test_an_nnx_layer_has_a_score_of_each_call() -> None:
    model = Twice()
    found = analysis.detect(model, TOKENS)["layer"]

    @nnx.jit
    def run(model: Twice) -> Any:
        x, first = model.layer(model.embedding(TOKENS), return_weights=True)
        return first, model.layer(x, return_weights=True)[1]

    i, j = np.arange(T)[:, None], np.arange(T)
    for n, weights in enumerate(run(model)):
        for name in NAMES:
            want = mean_weight(name, np.asarray(weights), np.broadcast_to(j <= i, (B, T, T)))
            np.testing.assert_allclose(found[name][n], want, rtol=1e-4)


class Jitted(nnx.Module):
    """An nnx model with one jitted function for all its calls, whose traces JAX keeps."""

    def __init__(self) -> None:
        self.model = Twice()
        self.run = nnx.jit(lambda model, tokens: model(tokens))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.run(self.model, tokens)


class LinenJitted(nn.Module):
    """A linen model with a jitted layer."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(V, D)(tokens)
        return nn.jit(MultiHeadAttention)(2, mask=masks.Causal())(x)


@pytest.mark.sampled(0.06)
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_models_that_call_jit_have_the_scores_of_each_call(kind: str) -> None:
    """And sow no scores in calls after a detection."""
    model: Any = LinenJitted() if kind == "linen" else Jitted()
    values = () if kind == "nnx" else (random_variables(model, TOKENS),)
    analysis.detect(model, *values, TOKENS)
    (after_another,) = analysis.detect(model, *values, TOKENS[::-1]).values()
    if kind == "nnx":
        _, sown = nnx.capture(lambda model: model(TOKENS), nnx.Intermediate)(model)
        assert not jax.tree.leaves(sown)
    jax.clear_caches()
    (alone,) = analysis.detect(model, *values, TOKENS[::-1]).values()
    jax.tree.map(np.testing.assert_array_equal, after_another, alone)


@pytest.mark.slow
def test_pairs_of_your_own_may_differ_by_head() -> None:
    x = np.random.default_rng(1).normal(size=(B, T, D)).astype(np.float32)
    values = random_variables(LAYER, x)
    backs = [masks.Window(n) & ~masks.Window(n - 1) for n in range(1, N + 1)]
    pairs = {"back": masks.PerHead(backs), "itself": np.eye(T, dtype=bool)}
    # No query sees a later key.
    pairs["none"] = np.triu(np.ones((T, T), bool), 1)
    found = detect(LAYER, values, x, mask=masks.Causal(), pairs=pairs)[""]
    assert np.isnan(found["none"]).all()
    _, weights = jax.jit(functools.partial(LAYER.apply, mask=masks.Causal(), return_weights=True))(
        values, x
    )
    weights = np.asarray(weights)
    want = [np.diagonal(weights[:, n], -n - 1, 1, 2).mean() for n in range(N)]
    np.testing.assert_allclose(found["back"], want, rtol=1e-5)
    want = np.diagonal(weights, 0, 2, 3).mean((0, 2))
    np.testing.assert_allclose(found["itself"], want, rtol=1e-5)


def trace(model: nn.Module, values: Any, tokens: Any, **options: Any) -> None:
    jax.eval_shape(functools.partial(analysis.detect, model, **options), values, tokens)


@pytest.mark.sampled(0.08)
def test_models_whose_weights_are_no_softmax_are_refused() -> None:
    cases = {
        "normalizer='sigmoid' and .* at decoder/layers_0": LAYER.clone(normalizer="sigmoid"),
        "got .*function": LAYER.clone(attention_fn=nn.dot_product_attention),
        "weights are one softmax": variants.TalkingHeadsAttention(N),
    }
    for message, layer in cases.items():
        model = language_model(layer)
        values = random_variables(model, TOKENS)
        with pytest.raises(ValueError, match=message):
            trace(model, values, TOKENS)
    model = language_model(LAYER)
    values = random_variables(model, TOKENS)
    change = {"decoder/layers_0/attention/attention_weights": edits.Edit(keep=0.5)}
    with pytest.raises(ValueError, match="one softmax"):
        trace(model, edits.attach(model, values, change, TOKENS), TOKENS)
    with pytest.raises(ValueError, match="must call self-attention layers"):
        trace(nn.Embed(V, D), random_variables(nn.Embed(V, D), TOKENS), TOKENS)
    with pytest.raises(ValueError, match="tokens in their order"):
        trace(model, values, TOKENS, order=np.arange(T)[::-1])


@pytest.mark.slow
def test_detectors_need_no_score_table() -> None:
    long = 4096
    layer = MultiHeadAttention(2, mask=masks.Causal(), sinks=True)
    model = language_model(layer)
    tokens = jax.ShapeDtypeStruct((1, long), jnp.int32)
    values = jax.eval_shape(model.init, jax.random.key(0), tokens)
    detect = jax.jit(functools.partial(analysis.detect, model))
    program = detect.lower(values, tokens).compile()
    # A table of scores of one head would take 64 MiB.
    assert program.memory_analysis().temp_size_in_bytes < 2**24


@pytest.mark.slow
def test_a_model_on_a_mesh_has_the_scores_of_one_device() -> None:
    model = language_model(LAYER.clone(num_kv_heads=N))
    values = random_variables(model, TOKENS)
    want = detect(model, values, TOKENS)
    for kind in KINDS:
        with on(kind):
            found = detect(model, values, TOKENS)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, want)
