"""flax_mha's function in the layers of linen and nnx, and Flax's function in flax_mha's layer."""

import functools
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_mha.nnx
from flax_mha import (
    MultiHeadAttention,
    MultiHeadDotProductAttention,
    SelfAttention,
    attention_fn,
    dot_product_attention_weights,
    masks,
    scores,
)
from tests.layer.test_flax_parity import OUTPUT, both, lenient, normal
from tests.support.oracle import error, random_like

KEY = jax.random.key(0, impl="unsafe_rbg")
X = normal(2, 5, 8)
REAL = np.array([[1, 1, 1, 1, 0], [1] * 5], np.float32)
MASK = np.tril(REAL[:, None, None, :] * np.ones((2, 1, 5, 5), np.float32))
Flax = nn.MultiHeadDotProductAttention


def params_of(layer: nn.Module, x: jax.Array = X) -> Any:
    return random_like(jax.eval_shape(lenient(layer.init), KEY, x))


@pytest.mark.parametrize("deterministic", [True, False])
def test_our_function_in_linen_layer(deterministic: bool) -> None:
    """Same numbers and sown weights. Dropout acts in training only."""
    plain = Flax(2, dropout_rate=0.5, force_fp32_for_softmax=True, precision="highest")
    ours = plain.clone(attention_fn=attention_fn)
    params = params_of(Flax(2))

    def run(layer: nn.Module) -> Any:
        call = {"mask": MASK, "deterministic": deterministic, "sow_weights": True}
        return layer.apply(params, X, rngs={"dropout": KEY}, mutable=["intermediates"], **call)

    (out, sown), (expected, expected_sown), (whole, _) = both(
        run, ours, plain, ours.clone(dropout_rate=0.0)
    )
    assert jax.tree.structure(sown) == jax.tree.structure(expected_sown)
    assert error(*map(jax.tree.leaves, (sown, expected_sown))) < OUTPUT
    assert (error(out, expected) < OUTPUT) == deterministic
    assert (error(out, whole) < 0.05) == deterministic


@pytest.mark.sampled(0.12)
def test_our_function_in_decoding_linen_layer() -> None:
    outs = []
    for function in (nn.dot_product_attention, attention_fn):
        layer = Flax(2, decode=True, attention_fn=function)
        params = params_of(layer)
        cache = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params["cache"])
        cache["cache_index"] = np.int32(0)
        step = lenient(jax.jit(functools.partial(layer.apply, mutable=["cache"])))
        steps = []
        for t in range(5):
            out, state = step({"params": params["params"], "cache": cache}, X[:, t : t + 1])
            cache = state["cache"]
            steps.append(out)
        outs.append(np.concatenate(steps, 1))
    assert error(*outs) < OUTPUT


@pytest.mark.sampled(0.12)
@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_our_function_in_nnx_layer() -> None:
    """Causal or not, with nnx's masks, grouped heads and sown weights."""

    def run(function: Any) -> Any:
        layer = nnx.MultiHeadAttention(
            2, 8, num_kv_heads=1, decode=False, rngs=nnx.Rngs(0), attention_fn=function
        )
        call = nnx.jit(lambda m: [m(X, mask=MASK, sow_weights=True), m(X, is_causal=True)])
        return *call(layer), layer.attention_weights.get_value()[0]

    actual, expected = run(attention_fn), lenient(run)(nnx.dot_product_attention)
    for found, wanted in zip(actual, expected, strict=True):
        assert error(found, wanted) < OUTPUT


def test_options_of_a_partial_function_stay() -> None:
    """Ours in Flax's layer, and Flax's in ours."""
    soft_cap = (scores.SoftCap(2.0),)
    capped = functools.partial(attention_fn, scores=soft_cap, kernel="reference")
    biased = functools.partial(nn.dot_product_attention, bias=normal(1, 2, 5, 5))
    params = params_of(Flax(2))
    outs = both(
        lambda layer: layer.apply(params, X),
        Flax(2, attention_fn=capped), MultiHeadAttention(2, scores=soft_cap),
        Flax(2, attention_fn=biased), MultiHeadAttention(2, attention_fn=biased),
    )  # fmt: skip
    assert error(outs[0], outs[1]) < OUTPUT
    assert error(outs[2], outs[3]) < OUTPUT
    assert error(outs[0], outs[2]) > 1e-3


@pytest.mark.sampled(0.12)
def test_flax_function_in_our_layer() -> None:
    """With every kind of mask, grouped heads and a bias. In decoding, and with sown weights."""
    ours = MultiHeadAttention(4, num_kv_heads=2, mask=masks.Causal())
    theirs = ours.clone(attention_fn=nn.dot_product_attention)
    params = params_of(ours)
    call = {"mask": masks.Window(2) & MASK, "bias": normal(4, 5, 5),
            "sow_weights": True, "mutable": ["intermediates"]}  # fmt: skip
    found, wanted = both(lambda layer: layer.apply(params, X, **call), theirs, ours)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert error(x, y) < OUTPUT

    def decode(layer: nn.Module) -> Any:
        layer = layer.clone(decode=True)
        cache = layer.init(KEY, np.zeros((2, 7, 8), np.float32))["cache"]
        return layer.apply(params | {"cache": cache}, X, mutable=["cache"])[0]

    assert error(*both(decode, theirs, ours)) < OUTPUT


def test_layer_calls_attention_fn_as_flax_does() -> None:
    calls = []

    def function(q: Any, k: Any, v: Any, mask: Any = None, **more: Any) -> Any:
        calls.append({"mask": mask, **more})
        return q

    def named(q: Any, k: Any, v: Any, mask: Any, dropout_rate: Any, deterministic: Any) -> Any:
        calls.append({"rate": dropout_rate, "deterministic": deterministic})
        return q

    layer = MultiHeadDotProductAttention(2, attention_fn=function, dropout_rate=0.5)
    params = params_of(MultiHeadAttention(2))
    apply = functools.partial(layer.apply, mask=MASK, deterministic=False, rngs={"dropout": KEY})
    jax.eval_shape(apply, params, X)
    assert calls[0]["mask"].shape == (2, 1, 5, 5)
    assert calls[0]["dropout_rate"] == 0.5
    assert calls[0]["dropout_rng"] is not None
    layer = layer.clone(attention_fn=named)
    jax.eval_shape(functools.partial(layer.apply, deterministic=True), params, X)
    assert calls[1] == {"rate": 0.0, "deterministic": True}


def test_invalid_mask_numbers_give_nan_through_attention_fn() -> None:
    layer = MultiHeadAttention(2, attention_fn=nn.dot_product_attention)
    params = params_of(MultiHeadAttention(2))
    wrong = MASK.copy()
    wrong[1, 0, 2, 1] = 0.5
    out = lenient(jax.jit(lambda m: layer.apply(params, X, mask=m)))(wrong)
    np.testing.assert_array_equal(np.isnan(out).all(-1), np.isnan(out).any(-1))
    assert np.isnan(out[1, 2]).all()
    assert np.isnan(out).any(-1).sum() == 1


@pytest.mark.parametrize("kind", [Flax, MultiHeadDotProductAttention])
def test_dtype_of_sown_weights(kind: Any) -> None:
    """As docs/coming-from-flax.md says: only Flax's are float32 under force_fp32_for_softmax."""
    for forced in (False, True):
        layer = kind(2, dtype=jnp.bfloat16, force_fp32_for_softmax=forced)
        sow = functools.partial(layer.apply, sow_weights=True, mutable="intermediates")
        _, found = jax.eval_shape(lenient(sow), params_of(layer), X)
        (weights,) = jax.tree.leaves(found["intermediates"])
        assert weights.dtype == (jnp.float32 if forced and kind is Flax else jnp.bfloat16)


@pytest.mark.sampled(0.15)
@pytest.mark.parametrize("dtype", [None, jnp.float64])
def test_attention_weights_match_flax(dtype: Any) -> None:
    """With a mask and a bias. Grouped keys and a fully masked query against NumPy."""
    q, k = (normal(2, n, 2, 4) for n in (5, 3))
    mask, bias = normal(2, 1, 5, 3) > 0, normal(2, 5, 3)
    mask[..., 0] = True
    call = {"bias": bias, "mask": mask, "deterministic": True, "dtype": dtype}
    functions = dot_product_attention_weights, nn.dot_product_attention_weights
    with jax.enable_x64(dtype is not None):
        ours, expected = both(lambda fn: fn(jnp.asarray(q), jnp.asarray(k), **call), *functions)
        assert ours.dtype == expected.dtype
        assert error(ours, expected) < OUTPUT
    mask[0, 0, 1] = False
    grouped = jax.jit(dot_product_attention_weights)(q, k[:, :, :1], mask=mask)
    logits = np.einsum("btnh,bsh->bnts", q, k[:, :, 0]) / 2
    weights = np.where(mask, np.exp(logits), 0)
    total = weights.sum(-1, keepdims=True)
    assert error(grouped, np.divide(weights, total, where=total > 0, out=weights)) < OUTPUT


@pytest.mark.sampled(0.08)
def test_returned_weights_include_dropout() -> None:
    class Sows(nn.Module):
        @nn.compact
        def __call__(self, q: jax.Array) -> jax.Array:
            return dot_product_attention_weights(q, q, is_causal=True, module=self, **dropped)

    q = normal(2, 5, 2, 4)
    dropped = {"dropout_rate": 0.5, "dropout_rng": KEY}

    @jax.jit
    def run(q: jax.Array) -> Any:
        weights, sown = Sows().apply({}, q, mutable=["intermediates"])
        (whole,) = sown["intermediates"]["attention_weights"]
        return weights, whole, attention_fn(q, q, q, is_causal=True, **dropped)

    weights, whole, out = run(q)
    kept = np.asarray(weights) > 0
    np.testing.assert_allclose(weights, np.where(kept, 2 * whole, 0), rtol=1e-6)
    assert 0.2 < kept[np.asarray(whole) > 0].mean() < 0.8
    assert error(np.einsum("bnts,bsnh->btnh", weights, q), out) < OUTPUT


@pytest.mark.sampled(0.15)
def test_self_attention_takes_mask_second() -> None:
    """With the parameters, names and numbers of `nn.SelfAttention`."""

    class Model(nn.Module):
        kind: Any

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return self.kind(2, dropout_rate=0.5)(x, MASK, True)

    ours, theirs = Model(SelfAttention), Model(nn.SelfAttention)
    params = random_like(jax.eval_shape(ours.init, KEY, X))
    assert list(params["params"]) == ["SelfAttention_0"]
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        (out, initial), (expected, wanted) = both(
            lambda layer: (layer.apply(params, X), layer.init(KEY, X)), ours, theirs
        )
    assert error(out, expected) < OUTPUT
    jax.tree.map(np.testing.assert_array_equal, initial, wanted)


@pytest.mark.sampled(0.12)
def test_causality_of_a_partial_function_holds_here_alone() -> None:
    """Flax's nnx layer passes `is_causal=False` over it."""
    causal = functools.partial(nnx.dot_product_attention, is_causal=True)

    def run(kind: Any, **call: Any) -> Any:
        function = nnx.dot_product_attention if call else causal
        layer = kind(2, 8, rngs=nnx.Rngs(0), decode=False, attention_fn=function)
        return lenient(nnx.jit(lambda layer: layer(X, **call)))(layer)

    ours, theirs = flax_mha.nnx.MultiHeadAttention, nnx.MultiHeadAttention
    assert error(run(ours), run(theirs, is_causal=True)) < OUTPUT
    assert error(run(theirs), run(theirs, is_causal=False)) < OUTPUT
