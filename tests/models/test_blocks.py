"""Blocks, encoders and the classifier against their formulas in NumPy float64."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import (
    MLP,
    Classifier,
    Encoder,
    EncoderBlock,
    MultiHeadAttention,
    dot_product_attention_weights,
    masks,
)
from flax_mha.models import PatchEmbedding, TokenEmbedding
from flax_mha.models.feed_forward import Dropout
from tests.support import oracle
from tests.support.oracle import error, random_like

KEY = jax.random.key(0)
# Float32 rounds at 6e-8; a block sums six times over at most 16 terms, and normalises twice.
OUTPUT, GRADIENT = 5e-6, 3e-5
B, T, D = 2, 4, 8
MASK = masks.Lengths(np.array([3, 4]))
ALLOWED = (np.arange(T) < np.array([3, 4])[:, None])[:, None, None]


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X = normal(B, T, D)


def block(attention: dict[str, Any] | None = None, **fields: Any) -> EncoderBlock:
    return EncoderBlock(MultiHeadAttention(2, **attention or {}), mlp_dim=16, **fields)


def parameters(module: nn.Module, *inputs: Any, **call: Any) -> Any:
    return random_like(jax.eval_shape(functools.partial(module.init, **call), KEY, *inputs))


@functools.cache
def compiled(module: nn.Module, **static: Any) -> Any:
    return jax.jit(lambda *args, rngs, **call: module.apply(*args, rngs=rngs, **call, **static))


def run(module: nn.Module, params: Any, *inputs: Any, seed: int = 0, **call: Any) -> Any:
    # XLA compiles each threefry hash in seconds, and this generator in milliseconds.
    rngs = {"dropout": jax.random.key(seed, impl="unsafe_rbg")}
    static = {k: call.pop(k) for k in ("deterministic", "sow_weights", "mutable") if k in call}
    return compiled(module, **static)(params, *inputs, rngs=rngs, **call)


def differentiate(module: nn.Module, params: Any, x: Any, **call: Any) -> Any:
    """Return the output, and its gradients with respect to parameters and input."""
    rngs = {"dropout": jax.random.key(0, impl="unsafe_rbg")}

    @jax.jit
    def both(params: Any, x: jax.Array) -> Any:
        out, back = jax.vjp(lambda *args: module.apply(*args, rngs=rngs, **call), params, x)
        return out, back(jnp.asarray(normal(*out.shape, seed=5)))

    return both(params, x)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", [*oracle.ACTIVATIONS])
def test_mlp_matches_formula(activation: str, gated: bool) -> None:
    module = MLP(16, activation, gated, use_bias=not gated)
    params = parameters(module, X)
    assert set(params["params"]) == {"up", "down"} | ({"gate"} if gated else set())
    assert error(run(module, params, X), oracle.mlp(params["params"], X, activation)) < OUTPUT


@pytest.mark.sampled(0.37)
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("pre_norm", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize(("activation", "gated"), [("gelu", False), ("silu", True)])
def test_block_matches_formula(norm: str, pre_norm: bool, activation: str, gated: bool) -> None:
    fields = {"norm": norm, "pre_norm": pre_norm, "activation": activation}
    module = block(gated=gated, **fields)
    params = parameters(module, X)
    expected = oracle.encoder_block(params["params"], X, allowed=ALLOWED, **fields)
    assert error(run(module, params, X, mask=MASK), expected) < OUTPUT


@pytest.mark.parametrize("name", ["block", "patches"])
def test_layer_norm_is_exact_far_from_0(name: str) -> None:
    """A shift by 1,024 that is exact in float32 changes no normed feature."""
    x, module = np.round(X * 64) / 64, block()
    if name == "patches":
        module, x = PatchEmbedding(1, D, norm_epsilon=1e-6), x[..., None, :]
    params, shift = parameters(module, x), 1024 * (name == "block")
    assert error(run(module, params, x + 1024) - shift, run(module, params, x)) < 1e-3


@pytest.mark.parametrize("rate", [0.001, 0.1])
def test_dropout_scales_half_precision_exactly(rate: float) -> None:
    x = normal(4096).astype(jnp.bfloat16)
    rngs = {"dropout": jax.random.key(0, impl="unsafe_rbg")}
    kept = np.asarray(Dropout(rate).apply({}, x, deterministic=False, rngs=rngs))
    exact = (x.astype(np.float64) / (1 - rate)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(kept, np.where(kept == 0, 0, exact))
    weights = functools.partial(dot_product_attention_weights, *x.reshape(2, 1, 64, 2, 16))
    kept = np.asarray(weights(dropout_rate=rate, deterministic=False, dropout_rng=KEY))
    exact = (np.asarray(weights()).astype(np.float64) / (1 - rate)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(kept, np.where(kept == 0, 0, exact))


def test_block_passes_arguments_to_attention() -> None:
    module, bias = block(), normal(1, T, T, seed=3)
    params = parameters(module, X)
    out, sown = run(module, params, X, bias=bias, sow_weights=True, mutable="intermediates")
    assert error(out, oracle.encoder_block(params["params"], X, bias=bias)) < OUTPUT
    [weights] = sown["intermediates"]["attention"]["attention_weights"]
    normed = oracle.layer_norm(params["params"]["attention_norm"], X.astype(np.float64))
    expected = oracle.multi_head(params["params"]["attention"], normed, bias=bias)[1]
    assert error(weights, expected) < OUTPUT


def test_layer_fields_hold_for_whole_block() -> None:
    module = block({"use_bias": False, "param_dtype": "bfloat16"})
    # Flax's norms promote their statistics implicitly.
    with jax.numpy_dtype_promotion("standard"):
        shapes = jax.eval_shape(module.init, KEY, X.astype("bfloat16"))["params"]
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    assert {leaf.dtype for _, leaf in leaves} == {jnp.dtype("bfloat16")}
    biases = {jax.tree_util.keystr(path) for path, _ in leaves if "bias" in str(path[-1])}
    assert biases == {"['attention_norm']['bias']", "['mlp_norm']['bias']"}


@pytest.mark.sampled(0.13, slow=0.2)
def test_dropout_follows_deterministic_and_key() -> None:
    module = block({"dropout_rate": 0.3}, dropout_rate=0.3)
    params = parameters(module, X, deterministic=True)
    off = run(module, params, X, deterministic=True)
    assert error(off, oracle.encoder_block(params["params"], X)) < OUTPUT
    on = run(module, params, X, deterministic=False)
    assert error(on, off) > 0.05
    np.testing.assert_array_equal(on, run(module, params, X, deterministic=False))
    assert error(run(module, params, X, deterministic=False, seed=1), on) > 0.05
    fixed = block({"dropout_rate": 0.3, "deterministic": True})
    assert error(run(fixed, params, X, deterministic=False), off) < OUTPUT


def constant(params: Any, **branches: float) -> Any:
    """Return parameters that make attention and MLP output constants for all inputs."""
    params = jax.tree.map(np.zeros_like, params)
    params["attention"]["out"]["bias"] += branches["attention"]
    params["mlp"]["down"]["bias"] += branches["mlp"]
    return params


@pytest.mark.slow
def test_each_dropout_acts() -> None:
    """On the attention weights, on the MLP's hidden features, and on the residual branches."""
    for module in (block({"dropout_rate": 0.5}), MLP(16, dropout_rate=0.5)):
        params = parameters(module, X, deterministic=True)
        on, off = (run(module, params, X, deterministic=off) for off in (False, True))
        assert error(on, off) > 0.05
    module = block(dropout_rate=0.5)
    params = parameters(module, X, deterministic=True)["params"]
    params = {"params": constant(params, attention=1.0, mlp=4.0)}
    added = run(module, params, 0 * X, deterministic=False)
    np.testing.assert_array_equal(np.unique(added), [0, 2, 8, 10])


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
def test_remat_changes_nothing(deterministic: bool) -> None:
    plain, remat = (
        block({"dropout_rate": 0.2}, dropout_rate=0.2, remat=remat) for remat in (False, True)
    )
    params = parameters(plain, X, deterministic=True)
    inits = [functools.partial(module.init, deterministic=True) for module in (plain, remat)]
    shapes = [jax.eval_shape(init, KEY, X) for init in inits]
    assert shapes[0] == shapes[1]
    call = {"deterministic": deterministic, "mask": MASK}
    out, actual = differentiate(remat, params, X, **call)
    expected_out, expected = differentiate(plain, params, X, **call)
    assert error(out, expected_out) < OUTPUT
    size = max(map(np.linalg.norm, jax.tree.leaves(expected)))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) < GRADIENT * size
    assert "remat" in str(jax.make_jaxpr(lambda: remat.apply(params, X, deterministic=True))())


def stacked(params: Any, layers: int) -> Any:
    """Stack a loop's parameters for a scan."""
    rest = {name: leaf for name, leaf in params["params"].items() if "layers_" not in name}
    each = [params["params"][f"layers_{i}"] for i in range(layers)]
    return {"params": {"layers": jax.tree.map(lambda *leaves: np.stack(leaves), *each), **rest}}


def encoded(
    params: Any, layers: int, norm: str = "layernorm", pre_norm: bool = True, **call: Any
) -> np.ndarray:
    """Compute the stack's formula on X."""
    x = X
    for i in range(layers):
        x = oracle.encoder_block(params[f"layers_{i}"], x, norm=norm, pre_norm=pre_norm, **call)
    return oracle.NORMS[norm](params["norm"], x) if pre_norm else x


@pytest.mark.sampled(0.125)
@pytest.mark.parametrize("pre_norm", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("remat", [False, True])
def test_scan_matches_loop(pre_norm: bool, remat: bool) -> None:
    of = block({"rotary": None}, pre_norm=pre_norm, remat=remat, norm="rmsnorm")
    loop, scan = Encoder(3, of), Encoder(3, of, scan=True)
    params = parameters(loop, X)
    assert ("norm" in params["params"]) == pre_norm
    both = stacked(params, 3)
    shapes = jax.tree.map(lambda leaf: leaf.shape, jax.eval_shape(scan.init, KEY, X))
    assert shapes == jax.tree.map(np.shape, both)
    expected = encoded(params["params"], 3, norm="rmsnorm", pre_norm=pre_norm, allowed=ALLOWED)
    if not remat:
        assert error(run(loop, params, X, mask=MASK), expected) < 3 * OUTPUT
    assert error(run(scan, both, X, mask=MASK), expected) < 3 * OUTPUT


@pytest.mark.sampled(0.13, slow=0.2)
def test_scanned_layers_start_differently() -> None:
    """All of them sow their weights."""
    encoder = Encoder(2, block(remat=True), scan=True)
    init = jax.jit(encoder.init)(jax.random.key(0, impl="unsafe_rbg"), X)
    kernels = init["params"]["layers"]["attention"]["query"]["kernel"]
    assert kernels.shape == (2, D, 2, D // 2)
    assert (kernels[0] != kernels[1]).all()
    _, sown = run(encoder, init, X, sow_weights=True, mutable="intermediates")
    [weights] = jax.tree.leaves(sown)
    assert weights.shape == (2, B, 2, T, T)


@pytest.mark.sampled(0.13, slow=0.2)
def test_scanned_layers_drop_differently() -> None:
    """Some of the sums of two constants halve only if the two layers drop differently."""
    encoder = Encoder(2, block(dropout_rate=0.5, norm="rmsnorm"), scan=True)
    params = parameters(encoder, X, deterministic=True)["params"]
    params = {
        "layers": constant(params["layers"], attention=1.0, mlp=0.0),
        "norm": {"scale": np.ones(D, np.float32)},
    }
    out = run(encoder, {"params": params}, 0 * X, deterministic=False)
    shares = np.asarray(out / out.max(-1, keepdims=True)).round(3)
    np.testing.assert_array_equal(np.unique(shares), [0, 0.5, 1])


def classifier(**fields: Any) -> Classifier:
    return Classifier(TokenEmbedding(9, D), Encoder(2, block()), num_classes=3, **fields)


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "none"])
def test_classifier_matches_formula(positions: str) -> None:
    """The formula is composed from its parts. Padding has no influence at all."""
    tokens, lengths = np.array([[1, 2, 3, 4], [5, 6, 7, 8]]), np.array([3, 4])
    model = classifier(positions=positions)
    params = parameters(model, tokens)
    p = params["params"]
    x = oracle.float64(p["embedding"]["table"]["embedding"])[tokens]
    if positions != "none":
        table = p.get("positions", {}).get("embedding", oracle.sinusoidal(np.arange(T), D))
        x = x + table
    for i in range(2):
        x = oracle.encoder_block(p["encoder"][f"layers_{i}"], x, allowed=ALLOWED)
    x = oracle.layer_norm(p["encoder"]["norm"], x)
    pooled = np.stack([row[:n].mean(0) for row, n in zip(x, lengths, strict=True)])
    logits = run(model, params, tokens, lengths=lengths)
    assert error(logits, oracle.project(p["head"], pooled)) < 3 * OUTPUT
    other = np.where(np.arange(T) < lengths[:, None], tokens, 0)
    np.testing.assert_array_equal(run(model, params, other, lengths=lengths), logits)


@pytest.mark.sampled(0.13, slow=0.2)
def test_classifier_padding_has_no_gradient() -> None:
    model = Classifier(
        PatchEmbedding((2, 1), D), Encoder(1, block()), num_classes=3, positions="none"
    )
    images = normal(B, 2, T, 1)
    params = parameters(model, images)
    lengths = np.array([3, 0])
    logits, (grads, dx) = differentiate(model, params, images, lengths=lengths)
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(logits[1], params["params"]["head"]["bias"], rtol=1e-6)
    np.testing.assert_array_equal((dx != 0).all((1, 3)), np.arange(T) < lengths[:, None])
    np.testing.assert_array_equal((dx != 0).any((1, 3)), np.arange(T) < lengths[:, None])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize(("size", "hw"), [(2, (2, 2)), ((2, 3), (2, 3)), ((4, 1), (4, 1))], ids=str)
def test_patch_embedding_matches_formula(size: Any, hw: tuple[int, int]) -> None:
    images = normal(2, 4, 6, 3)
    module = PatchEmbedding(size, D)
    params = parameters(module, images)
    expected = oracle.project(params["params"]["patches"], oracle.patchify(images, *hw))
    assert error(run(module, params, images), expected) < OUTPUT
    assert error(run(module, params, images[0]), expected[0]) < OUTPUT


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("pre_norm", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("given", ["float32", "bfloat16"])
def test_bfloat16_loop_and_scan_have_one_dtype(pre_norm: bool, given: str) -> None:
    """The computation is bfloat16 with float32 parameters."""
    of = block({"dtype": "bfloat16"}, pre_norm=pre_norm)
    x = X.astype(given)
    loop, scan = Encoder(2, of), Encoder(2, of, scan=True)
    # Flax's norms promote their statistics implicitly.
    with jax.numpy_dtype_promotion("standard"):
        params = parameters(loop, x)
        out, scanned = run(loop, params, x), run(scan, stacked(params, 2), x)
    exact = encoded(params["params"], 2, pre_norm=pre_norm)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    assert out.dtype == jnp.bfloat16
    assert scanned.dtype == jnp.bfloat16
    # Two blocks, each with a dozen roundings to 8 significand bits.
    assert error(out, exact) < 3e-2
    assert error(scanned, exact) < 3e-2
