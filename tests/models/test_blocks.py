"""Parts of blocks, and stacks of them, against their formulas in NumPy float64."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import (
    MLP,
    Encoder,
    EncoderBlock,
    MultiHeadAttention,
    dot_product_attention_weights,
    masks,
)
from flax_mha.models import PatchEmbedding
from flax_mha.models.feed_forward import Dropout
from tests.support import oracle
from tests.support.arrays import random_variables
from tests.support.oracle import error

KEY = jax.random.key(0)
# Float32 rounds at 6e-8; a block sums six times over at most 16 terms, and normalises twice.
OUTPUT = 5e-6
B, T, D = 2, 4, 8
MASK = masks.Lengths(np.array([3, 4]))
ALLOWED = (np.arange(T) < np.array([3, 4])[:, None])[:, None, None]


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X = normal(B, T, D)


def block(attention: dict[str, Any] | None = None, **fields: Any) -> EncoderBlock:
    return EncoderBlock(MultiHeadAttention(2, **attention or {}), mlp_dim=16, **fields)


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


@pytest.mark.parametrize("activation", [*oracle.ACTIVATIONS])
def test_mlp_matches_formula(activation: str) -> None:
    for gated in (False, True):
        module = MLP(16, activation, gated, use_bias=not gated)
        params = random_variables(module, X)
        assert set(params["params"]) == {"up", "down"} | ({"gate"} if gated else set())
        assert error(run(module, params, X), oracle.mlp(params["params"], X, activation)) < OUTPUT


@pytest.mark.parametrize("name", ["block", "patches"])
def test_layer_norm_is_exact_far_from_0(name: str) -> None:
    """A shift by 1,024 that is exact in float32 changes no normed feature."""
    x, module = np.round(X * 64) / 64, block()
    if name == "patches":
        module, x = PatchEmbedding(1, D, norm_epsilon=1e-6), x[..., None, :]
    params, shift = random_variables(module, x), 1024 * (name == "block")
    assert error(run(module, params, x + 1024) - shift, run(module, params, x)) < 1e-3


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("rate", [0.001, 0.1])
def test_dropout_scales_half_precision_exactly(rate: float) -> None:
    x = normal(4096).astype(jnp.bfloat16)

    @jax.jit
    def drop(x: jax.Array, key: jax.Array) -> Any:
        weights = functools.partial(dot_product_attention_weights, *x.reshape(2, 1, 64, 2, 16))
        fewer = weights(dropout_rate=rate, deterministic=False, dropout_rng=key)
        features = Dropout(rate).apply({}, x, deterministic=False, rngs={"dropout": key})
        return (features, x), (fewer, weights())

    for kept, whole in drop(x, jax.random.key(0, impl="unsafe_rbg")):
        exact = (np.asarray(whole).astype(np.float64) / (1 - rate)).astype(jnp.bfloat16)
        np.testing.assert_array_equal(kept, np.where(np.asarray(kept) == 0, 0, exact))


def test_layer_fields_hold_for_whole_block() -> None:
    module = block({"use_bias": False, "param_dtype": "bfloat16"})
    # Flax's norms promote their statistics implicitly.
    with jax.numpy_dtype_promotion("standard"):
        shapes = jax.eval_shape(module.init, KEY, X.astype("bfloat16"))["params"]
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    assert {leaf.dtype for _, leaf in leaves} == {jnp.dtype("bfloat16")}
    biases = {jax.tree_util.keystr(path) for path, _ in leaves if "bias" in str(path[-1])}
    assert biases == {"['attention_norm']['bias']", "['mlp_norm']['bias']"}


DROPPING = {
    "weights": block({"dropout_rate": 0.3}), "features": MLP(16, dropout_rate=0.3),
    "branches": block(dropout_rate=0.3), "switched off": block({"deterministic": True}),
}  # fmt: skip


@pytest.mark.sampled(0.15)
@pytest.mark.parametrize("name", DROPPING)
def test_dropout_follows_deterministic_and_key(name: str) -> None:
    module = DROPPING[name]
    params = random_variables(module, X, deterministic=True)
    off = run(module, params, X, deterministic=True)
    plain = oracle.mlp if name == "features" else oracle.encoder_block
    assert error(off, plain(params["params"], X)) < OUTPUT
    on, same, other = (run(module, params, X, deterministic=False, seed=n) for n in (0, 0, 1))
    np.testing.assert_array_equal(on, same)
    for pair in ((on, off), (on, other)):
        assert (error(*pair) > 0.05) == (name != "switched off")


def constant(params: Any, **branches: float) -> Any:
    """Return parameters that make attention and MLP output constants for all inputs."""
    params = jax.tree.map(np.zeros_like, params)
    params["attention"]["out"]["bias"] += branches["attention"]
    params["mlp"]["down"]["bias"] += branches["mlp"]
    return params


def stacked(params: Any, layers: int) -> Any:
    """Stack a loop's parameters for a scan."""
    rest = {name: leaf for name, leaf in params["params"].items() if "layers_" not in name}
    each = [params["params"][f"layers_{i}"] for i in range(layers)]
    return {"params": {"layers": jax.tree.map(lambda *leaves: np.stack(leaves), *each), **rest}}


@pytest.mark.sampled(0.15)
@pytest.mark.parametrize("pre_norm", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loop_and_scan_match_formula(pre_norm: bool, dtype: str) -> None:
    """Parameters and inputs are float32."""
    layer = block({"dtype": dtype}, pre_norm=pre_norm)
    loop, scan = Encoder(2, layer), Encoder(2, layer, scan=True)
    # Flax's norms promote their statistics implicitly.
    with jax.numpy_dtype_promotion("standard"):
        params = random_variables(loop, X)
        assert ("norm" in params["params"]) == pre_norm
        several = stacked(params, 2)
        shapes = jax.tree.map(lambda leaf: leaf.shape, jax.eval_shape(scan.init, KEY, X))
        assert shapes == jax.tree.map(np.shape, several)
        outs = run(loop, params, X, mask=MASK), run(scan, several, X, mask=MASK)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    expected = X
    for i in range(2):
        inner = params["params"][f"layers_{i}"]
        expected = oracle.encoder_block(inner, expected, pre_norm=pre_norm, allowed=ALLOWED)
    expected = oracle.layer_norm(params["params"]["norm"], expected) if pre_norm else expected
    for out in outs:
        assert out.dtype == dtype
        # Two blocks, each with a dozen roundings to 8 significand bits.
        assert error(out, expected) < (3 * OUTPUT if dtype == "float32" else 3e-2)


@pytest.mark.sampled(0.08)
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


@pytest.mark.sampled(0.08)
def test_scanned_layers_drop_differently() -> None:
    """Some of the sums of two constants halve only if the two layers drop differently."""
    encoder = Encoder(2, block(dropout_rate=0.5, norm="rmsnorm"), scan=True)
    params = random_variables(encoder, X, deterministic=True)["params"]
    params = {
        "layers": constant(params["layers"], attention=1.0, mlp=0.0),
        "norm": {"scale": np.ones(D, np.float32)},
    }
    out = run(encoder, {"params": params}, 0 * X, deterministic=False)
    shares = np.asarray(out / out.max(-1, keepdims=True)).round(3)
    np.testing.assert_array_equal(np.unique(shares), [0, 0.5, 1])


@pytest.mark.parametrize(("size", "hw"), [(2, (2, 2)), ((4, 1), (4, 1))], ids=str)
def test_patch_embedding_matches_formula(size: Any, hw: tuple[int, int]) -> None:
    images = normal(2, 4, 6, 3)
    module = PatchEmbedding(size, D)
    params = random_variables(module, images)
    h, w = hw
    patches = images.reshape(2, 4 // h, h, 6 // w, w, 3).swapaxes(2, 3).reshape(2, -1, h * w * 3)
    expected = oracle.project(params["params"]["patches"], patches)
    assert error(run(module, params, images), expected) < OUTPUT
    assert error(run(module, params, images[0]), expected[0]) < OUTPUT
