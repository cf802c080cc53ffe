"""Circuits read from weights, and logits by their parts, against NumPy in float64."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import (
    Capture,
    Decoder,
    DecoderBlock,
    LanguageModel,
    MultiHeadAttention,
    analysis,
    masks,
    models,
    positions,
    variants,
)  # fmt: skip
from flax_mha.analysis import Factored
from tests.support import oracle
from tests.support.arrays import random_variables

B, T, D, N, K, H, V = 2, 6, 12, 4, 2, 4, 9
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, V, (B, T))
TARGETS = (RNG.integers(0, V, (B, T)), RNG.integers(0, V, (B, T)))
X = RNG.normal(size=(1, T, D)).astype(np.float32)
ROTARY = positions.Rotary(base=50.0, fraction=0.5)
LAYERS = {
    "plain": MultiHeadAttention(N, head_dim=3, v_head_dim=5),
    "grouped, a learned scale": MultiHeadAttention(N, num_kv_heads=K, head_dim=H, scale="learned"),
    "rotary": MultiHeadAttention(N, num_kv_heads=K, head_dim=H, rotary=ROTARY, use_bias=False),
    "rotary and biases": MultiHeadAttention(N, num_kv_heads=K, head_dim=H, rotary=ROTARY),
    "yarn": MultiHeadAttention(
        N, head_dim=H, scale=0.3, rotary=positions.Rotary(scaling=positions.Yarn(4.0, 16))
    ),
}


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize(
    "name", [x if "and b" in x else pytest.param(x, marks=pytest.mark.slow) for x in LAYERS]
)
def test_qk_and_ov_give_scores_and_outputs(name: str) -> None:
    layer = LAYERS[name]
    norm = {"scale": RNG.normal(size=D), "bias": RNG.normal(size=D)}
    norm = {key: x.astype(np.float32) for key, x in norm.items()}
    values = random_variables(layer, X)
    layer = layer.clone(capture=Capture(("scores", "weights", "result")))
    run = jax.jit(functools.partial(layer.apply, mutable="intermediates"))
    _, sown = run(values, X * norm["scale"] + norm["bias"])
    sown = {key: np.asarray(x[0][0], np.float64) for key, x in sown["intermediates"].items()}
    x = np.concatenate([X[0], np.ones((T, 1))], -1)
    take = functools.partial(analysis.qk, layer, values["params"], norm=norm, biases=True)
    for i, j in ((4, 1), (2, 5), (3, 3)):
        forms = oracle.float64(take(distance=i - j).dense())
        got = np.einsum("d,nde,e->n", x[i], forms, x[j])
        np.testing.assert_allclose(got, sown["attention_scores"][:, i, j], rtol=1e-4, atol=1e-4)
    ov = oracle.float64(analysis.ov(layer, values["params"], norm=norm, biases=True).dense())
    want = np.einsum("ntd,nde->tne", sown["attention_weights"] @ x, ov)
    np.testing.assert_allclose(sown["attention_result"], want, rtol=1e-4, atol=1e-4)


def test_without_biases_circuits_are_products_of_kernels() -> None:
    layer = LAYERS["grouped, a learned scale"]
    p = random_variables(layer, X)["params"]
    w = oracle.float64({name: x["kernel"] for name, x in p.items() if name != "score_scale"})
    for n in range(N):
        want = p["score_scale"][n] * w["query"][:, n] @ w["key"][:, n // 2].T
        np.testing.assert_allclose(analysis.qk(layer, p).dense()[n], want, rtol=1e-5, atol=1e-5)
        want = w["value"][:, n // 2] @ w["out"][n]
        np.testing.assert_allclose(analysis.ov(layer, p).dense()[n], want, rtol=1e-5, atol=1e-5)


def test_scanned_layers_have_circuits_too() -> None:
    linen = LAYERS["rotary"]
    p = random_variables(linen, X)["params"]
    want = analysis.qk(linen, p, distance=3)
    stacked = {"params": {"layers": {"attention": jax.tree.map(lambda x: np.stack([0 * x, x]), p)}}}
    one = analysis.parameters(stacked, "layers/attention", 1)
    jax.tree.map(np.testing.assert_array_equal, analysis.qk(linen, one, distance=3), want)
    with pytest.raises(KeyError, match="mlp"):
        analysis.parameters(stacked, "layers/mlp")


def test_factored_matrices_have_the_values_of_whole_ones() -> None:
    a, b = (Factored(*RNG.normal(size=(2, 3, 7, 2)).astype(np.float32)) for _ in range(2))
    a, b = (Factored(x.left, jnp.swapaxes(x.right, -1, -2)) for x in (a, b))
    whole, other = (oracle.float64(x.left) @ oracle.float64(x.right) for x in (a, b))
    np.testing.assert_allclose((a @ b).dense(), whole @ other, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(a.T.dense(), np.swapaxes(whole, -1, -2), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(a.norm(), np.linalg.norm(whole, axis=(-1, -2)), rtol=1e-5)
    u, s, vh = a.svd()
    np.testing.assert_allclose(s, np.linalg.svd(whole, compute_uv=False)[:, :2], rtol=1e-5)
    np.testing.assert_allclose((u * s[:, None]) @ vh, whole, rtol=1e-4, atol=1e-5)


def test_no_matrix_of_all_features_is_formed() -> None:
    wide = Factored(*(jax.ShapeDtypeStruct(x, np.float32) for x in ((512, 8), (8, 512))))
    text = str(jax.make_jaxpr(lambda x: (x.norm(), x.svd(), (x @ x.T).norm()))(wide))
    assert "512,8" in text
    assert "512,512" not in text


@pytest.mark.slow
def test_composition_is_the_ratio_of_norms() -> None:
    layer = LAYERS["grouped, a learned scale"]
    first, second = (oracle.random_like(random_variables(layer, X), n)["params"] for n in (1, 2))
    ov, qk, later = (
        analysis.ov(layer, first),
        analysis.qk(layer, second),
        analysis.ov(layer, second),
    )
    a, b, c = (oracle.float64(x.dense()) for x in (ov, qk, later))
    for kind, product, last, of in (
        ("q", lambda i, j: a[i] @ b[j], qk, b), ("k", lambda i, j: b[j] @ a[i].T, qk, b),
        ("v", lambda i, j: a[i] @ c[j], later, c),
    ):  # fmt: skip
        got = analysis.composition(kind, ov, last)
        want = [[np.linalg.norm(product(i, j)) / np.linalg.norm(a[i]) / np.linalg.norm(of[j])
                 for j in range(N)] for i in range(N)]  # fmt: skip
        np.testing.assert_allclose(got, want, rtol=1e-4)


def test_layers_without_such_circuits_are_refused() -> None:
    normed = MultiHeadAttention(N, normalize_qk=True)
    gated = MultiHeadAttention(N, gate="head")
    p: dict[str, Any] = {}
    for call, message in (
        (lambda: analysis.qk(normed, p), "without normalize_qk, got True"),
        (lambda: analysis.ov(gated, p), "without gate, got 'head'"),
        (lambda: analysis.qk(variants.DifferentialAttention(N), p), "must be a MultiHeadAttention"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    p = random_variables(LAYERS["rotary"], X)["params"]
    growing = positions.Rotary(scaling=positions.DynamicNtk(2.0, 8))
    for rotary, message in ((growing, "only on i − j"), (ROTARY, "needs a distance")):
        with pytest.raises(ValueError, match=message):
            analysis.qk(LAYERS["rotary"].clone(rotary=rotary), p)


LAYER = MultiHeadAttention(N, num_kv_heads=K, head_dim=H, rotary=ROTARY)
MODELS: dict[str, Any] = {
    "scanned groups with one left": (
        (DecoderBlock(LAYER, 8), DecoderBlock(LAYER.clone(mask=masks.Window(2)), 8)),
        {"scan": True}, {},
    ),
    "a gate, parallel": (
        DecoderBlock(LAYER.clone(gate="feature"), 8, norm="rmsnorm", parallel=True, gated=True),
        {"input_norm": True, "final_norm": False}, {"tied": False, "logits_scale": 0.5},
    ),
    "a memory": (DecoderBlock(LAYER, 8, cross_attention=MultiHeadAttention(N)), {}, {}),
}  # fmt: skip


@pytest.mark.sampled(0.12)
@pytest.mark.parametrize("name", MODELS)
def test_shares_sum_to_the_logits(name: str) -> None:
    """The last lens is of the logits."""
    block, stack, options = MODELS[name]
    model = LanguageModel(models.TokenEmbedding(V, D), Decoder(3, block, **stack), **options)
    call, path = {}, "decoder/layers_2/attention"
    if name == "a memory":
        memory = RNG.normal(size=(B, 3, D)).astype(np.float32)
        call, path = {"memory": memory}, "decoder/layers_2/cross_attention"
    values = random_variables(model, TOKENS, *call.values())

    @jax.jit
    def run(values: Any) -> Any:
        shares = analysis.attribute_logits(model, values, TOKENS, TARGETS, **call)
        one = analysis.attribute_logits(model, values, TOKENS, TARGETS[0], **call)
        lens = analysis.logit_lens(model, values, TOKENS, **call)
        return shares, one, lens, model.apply(values, TOKENS, **call)

    shares, one, lens, logits = run(values)
    np.testing.assert_allclose(lens[-1], logits, rtol=1e-4, atol=1e-4)
    assert len(lens) == 4
    right, wrong = (np.take_along_axis(np.asarray(logits), x[..., None], -1)[..., 0]
                    for x in TARGETS)  # fmt: skip
    for got, want in ((shares, right - wrong), (one, right)):
        total = sum(np.sum(x, -1) if x.ndim > 2 else np.asarray(x) for x in got.values())
        np.testing.assert_allclose(total, want, rtol=1e-4, atol=2e-4)
    assert shares[path].shape == (B, T, N)


@pytest.mark.sampled(0.08)
def test_shares_and_lens_are_those_of_numpy() -> None:
    block = DecoderBlock(LAYER, mlp_dim=8, norm_epsilon=0.1)
    model = LanguageModel(models.TokenEmbedding(V, D), Decoder(1, block))
    values = random_variables(model, TOKENS)
    watched = analysis.watch(model, Capture(("result", "resid_pre", "resid_post")))
    _, sown = jax.jit(functools.partial(watched.apply, mutable="intermediates"))(values, TOKENS)
    p, sown = oracle.float64(values["params"]), sown["intermediates"]["decoder"]["layers_0"]
    table, norm = p["embedding"]["table"]["embedding"], p["decoder"]["norm"]
    first, last = (oracle.float64(sown[f"resid_{x}"][0]) for x in ("pre", "post"))

    def normed(x: np.ndarray, of: np.ndarray) -> np.ndarray:
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(of.var(-1, keepdims=True) + 0.1)

    lens = jax.jit(functools.partial(analysis.logit_lens, model))(values, TOKENS)
    for got, x in zip(lens, (first, last), strict=True):
        want = (normed(x, x) * norm["scale"] + norm["bias"]) @ table.T
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    shares = jax.jit(functools.partial(analysis.attribute_logits, model))(values, TOKENS, TARGETS)
    u = table[TARGETS[0]] - table[TARGETS[1]]
    results = oracle.float64(sown["attention"]["attention_result"][0])
    for n in range(N):
        want = (normed(results[..., n, :], last) * norm["scale"] * u).sum(-1)
        got = shares["decoder/layers_0/attention"][..., n]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    want = (normed(first, last) * norm["scale"] * u).sum(-1)
    np.testing.assert_allclose(shares["decoder/embed"], want, rtol=1e-4, atol=1e-4)


def test_models_that_are_not_linear_after_their_heads_are_refused() -> None:
    def trace(model: Any) -> None:
        values = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
        run = functools.partial(analysis.attribute_logits, model, targets=TARGETS)
        jax.eval_shape(run, values, TOKENS)

    embedding = models.TokenEmbedding(V, D)
    for block, message in (
        (DecoderBlock(LAYER, 8, branch_norm=True, layer_scale=0.1), "branch_norm and layer_scale"),
        (DecoderBlock(LAYER, 8, pre_norm=False), "with pre_norm"),
        (DecoderBlock(LAYER, 8, norm=nn.GroupNorm(2)), "a norm of another kind"),
    ):
        with pytest.raises(ValueError, match=message):
            trace(LanguageModel(embedding, Decoder(1, block)))
    decoder = Decoder(1, DecoderBlock(LAYER, 8))
    with pytest.raises(ValueError, match="with logits_cap"):
        trace(LanguageModel(embedding, decoder, logits_cap=3.0))
