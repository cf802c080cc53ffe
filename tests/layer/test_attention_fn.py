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
from tests.layer.test_flax_parity import OUTPUT, lenient, normal
from tests.support.oracle import error, random_like

KEY = jax.random.key(0, impl="unsafe_rbg")
X = jnp.asarray(normal(2, 5, 8))
REAL = np.array([[1, 1, 1, 1, 0], [1] * 5], np.float32)
MASK = np.tril(REAL[:, None, None, :] * np.ones((2, 1, 5, 5), np.float32))
Flax = nn.MultiHeadDotProductAttention


def params_of(layer: nn.Module, x: jax.Array = X) -> Any:
    return random_like(jax.eval_shape(lenient(layer.init), KEY, x))


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
def test_our_function_in_linen_layer(deterministic: bool) -> None:
    """Same numbers and sown weights. Dropout acts in training only."""
    plain = Flax(2, dropout_rate=0.5, force_fp32_for_softmax=True, precision="highest")
    ours = plain.clone(attention_fn=attention_fn)
    params = params_of(Flax(2))

    def run(layer: nn.Module) -> Any:
        call = {"mask": MASK, "deterministic": deterministic, "sow_weights": True}
        return layer.apply(
            params, X, rngs={"dropout": KEY}, mutable=["intermediates"], **call
        )  # fmt: skip

    out, sown = jax.jit(lambda: run(ours))()
    expected, expected_sown = lenient(jax.jit(lambda: run(plain)))()
    assert jax.tree.structure(sown) == jax.tree.structure(expected_sown)
    assert error(*map(jax.tree.leaves, (sown, expected_sown))) < OUTPUT
    assert (error(out, expected) < OUTPUT) == deterministic
    if not deterministic:
        assert error(out, run(ours.clone(dropout_rate=0.0))[0]) > 0.05


def test_our_function_in_decoding_linen_layer() -> None:
    outs = []
    for function in (nn.dot_product_attention, attention_fn):
        layer = Flax(2, decode=True, attention_fn=function)
        params = params_of(layer)
        cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params["cache"])
        cache["cache_index"] = jnp.int32(0)
        step = lenient(jax.jit(functools.partial(layer.apply, mutable=["cache"])))
        steps = []
        for t in range(5):
            out, state = step({"params": params["params"], "cache": cache}, X[:, t : t + 1])
            cache = state["cache"]
            steps.append(out)
        outs.append(np.concatenate(steps, 1))
    assert error(*outs) < OUTPUT


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
@pytest.mark.parametrize("groups", [2, 1])
def test_our_function_in_nnx_layer(groups: int) -> None:
    """Causal or not, with nnx's masks, grouped heads and sown weights."""

    def run(function: Any) -> Any:
        layer = nnx.MultiHeadAttention(
            2, 8, num_kv_heads=groups, decode=False, rngs=nnx.Rngs(0), attention_fn=function
        )
        both = [layer(X, mask=MASK, sow_weights=True), layer(X, is_causal=True)]
        return both, layer.attention_weights.get_value()

    (outs, weights), (expected, expected_weights) = (
        run(attention_fn),
        lenient(run)(nnx.dot_product_attention),
    )
    assert error(outs[0], expected[0]) < OUTPUT
    assert error(outs[1], expected[1]) < OUTPUT
    assert error(weights[0], expected_weights[0]) < OUTPUT


def test_our_function_takes_options_by_partial() -> None:
    function = functools.partial(attention_fn, scores=(scores.SoftCap(2.0),), kernel="reference")
    ours = MultiHeadAttention(2, scores=(scores.SoftCap(2.0),))
    params = params_of(ours)
    out = Flax(2, attention_fn=function).apply(params, X)
    assert error(out, ours.apply(params, X)) < OUTPUT


def test_bias_of_a_partial_function_stays() -> None:
    function = functools.partial(nn.dot_product_attention, bias=jnp.asarray(normal(1, 2, 5, 5)))
    plain = Flax(2, attention_fn=function)
    params = params_of(Flax(2))
    ours = MultiHeadAttention(2, attention_fn=function)
    assert error(*(jax.jit(m.apply)(params, X) for m in (ours, plain))) < OUTPUT


@pytest.mark.slow
def test_flax_function_in_our_layer() -> None:
    """With every kind of mask, grouped heads and a bias. In decoding, and with sown weights."""
    ours = MultiHeadAttention(4, num_kv_heads=2, mask=masks.Causal())
    theirs = ours.clone(attention_fn=nn.dot_product_attention)
    params = params_of(ours)
    call = {"mask": masks.Window(2) & MASK, "bias": jnp.asarray(normal(4, 5, 5)),
            "sow_weights": True, "mutable": ["intermediates"]}  # fmt: skip

    def run(layer: nn.Module) -> Any:
        return layer.apply(params, X, **call)

    (out, sown), (expected, expected_sown) = lenient(run)(theirs), run(ours)
    assert error(out, expected) < OUTPUT
    assert error(*map(jax.tree.leaves, (sown, expected_sown))) < OUTPUT
    room = jnp.zeros((2, 7, 8))
    outs = []
    for layer in (theirs.clone(decode=True), ours.clone(decode=True)):
        cache = lenient(layer.init)(KEY, room)["cache"]
        out, _ = lenient(layer.apply)(params | {"cache": cache}, X, mutable=["cache"])
        outs.append(out)
    assert error(*outs) < OUTPUT


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
    layer.apply(params, X, mask=MASK, deterministic=False, rngs={"dropout": KEY})
    assert calls[0]["mask"].shape == (2, 1, 5, 5)
    assert calls[0]["dropout_rate"] == 0.5
    assert calls[0]["dropout_rng"] is not None
    layer.clone(attention_fn=named).apply(params, X, deterministic=True)
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


@pytest.mark.sampled(0.13, slow=0.2)
@pytest.mark.parametrize("dtype", [None, jnp.float64])
def test_attention_weights_match_flax(dtype: Any) -> None:
    """With a mask and a bias, sown too. Grouped keys and a fully masked query against NumPy."""
    q, k = (jnp.asarray(normal(2, n, 2, 4)) for n in (5, 3))
    mask, bias = jnp.asarray(normal(2, 1, 5, 3) > 0).at[..., 0].set(True), normal(2, 5, 3)
    call = {"bias": jnp.asarray(bias), "mask": mask, "deterministic": True, "dtype": dtype}
    with jax.enable_x64(dtype is not None):
        ours = dot_product_attention_weights(q, k, **call)
        expected = lenient(nn.dot_product_attention_weights)(q, k, **call)
        assert ours.dtype == expected.dtype
        assert error(ours, expected) < OUTPUT
    grouped = dot_product_attention_weights(q, k[:, :, :1], mask=mask.at[0, 0, 1].set(False))
    scores = np.einsum("btnh,bsh->bnts", q, k[:, :, 0]) / 2 + np.where(mask, 0, -np.inf)
    expected = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    expected[0, :, 1] = 0
    assert error(grouped, expected) < OUTPUT


@pytest.mark.sampled(0.13, slow=0.2)
def test_returned_weights_include_dropout() -> None:
    class Sows(nn.Module):
        @nn.compact
        def __call__(self, q: jax.Array) -> jax.Array:
            return dot_product_attention_weights(q, q, is_causal=True, module=self, **dropped)

    q = jnp.asarray(normal(2, 5, 2, 4))
    dropped = {"dropout_rate": 0.5, "dropout_rng": KEY}
    weights, sown = Sows().apply({}, q, mutable=["intermediates"])
    (whole,) = sown["intermediates"]["attention_weights"]
    kept = np.asarray(weights) > 0
    np.testing.assert_allclose(weights, np.where(kept, 2 * whole, 0), rtol=1e-6)
    assert 0.2 < kept[np.asarray(whole) > 0].mean() < 0.8
    out = attention_fn(q, q, q, is_causal=True, **dropped)
    assert error(np.einsum("bnts,bsnh->btnh", weights, q), out) < OUTPUT


@pytest.mark.sampled(0.13, slow=0.2)
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
        expected = lenient(theirs.apply)(params, X)
        initial = lenient(theirs.init)(KEY, X)
    assert error(ours.apply(params, X), expected) < OUTPUT
    jax.tree.map(np.testing.assert_array_equal, ours.init(KEY, X), initial)


@pytest.mark.sampled(0.13, slow=0.2)
def test_causality_of_a_partial_function_holds_here_alone() -> None:
    """Flax's nnx layer passes `is_causal=False` over it."""
    causal = functools.partial(nnx.dot_product_attention, is_causal=True)
    fields = {"decode": False, "attention_fn": causal}
    ours, theirs = (
        kind(2, 8, rngs=nnx.Rngs(0), **fields)
        for kind in (flax_mha.nnx.MultiHeadAttention, nnx.MultiHeadAttention)
    )
    found, others = ours(X), lenient(theirs)(X)
    ours.attention_fn = None
    assert error(found, ours(X, is_causal=True)) < OUTPUT
    assert error(others, ours(X)) < OUTPUT
