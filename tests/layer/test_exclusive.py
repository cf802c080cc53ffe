"""Exclusive self-attention: no output has a part along its token's own value."""

from typing import Any

import jax
import numpy as np
import pytest

import flax_mha
from flax_mha import CacheConfig, MultiHeadAttention, edits, masks
from flax_mha.layer.exclusive import exclude_own
from tests.support.decoding import decoded
from tests.support.oracle import float64, random_like

N, K, H, D, T = 4, 2, 8, 16, 12
KEY = jax.random.key(0)
X = np.random.default_rng(1).normal(size=(2, T, D)).astype(np.float32)


def layer(**fields: Any) -> MultiHeadAttention:
    defaults: dict[str, Any] = {"num_kv_heads": K, "head_dim": H, "mask": masks.Causal()}
    return MultiHeadAttention(N, exclusive=True, **defaults | fields)


def params_of(module: Any, *inputs: Any) -> Any:
    return random_like(jax.eval_shape(module.init, KEY, X, *inputs))


@pytest.mark.parametrize("scale", [1.0, 1e-15, 1e15])
def test_heads_are_orthogonal_to_their_values(scale: float) -> None:
    z, v = (np.random.default_rng(n).normal(size=(2, T, n, H)) for n in (N, K))
    z, v = np.float32(z), np.float32(v * scale)
    v[0, 0] = 0  # Nothing is removed, and gradients are 0.

    def loss(z: jax.Array, v: jax.Array) -> Any:
        out = exclude_own(z, v)
        return out.sum(), out

    (_, dv), out = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(z, v)
    np.testing.assert_array_equal(dv[0, 0], 0)
    np.testing.assert_array_equal(out[0, 0], z[0, 0])
    own = np.repeat(float64(v) / scale, N // K, 2)
    size = (own**2).sum(-1, keepdims=True)
    expected = z - (z * own).sum(-1, keepdims=True) / np.where(size > 0, size, 1) * own
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_allclose((out * own).sum(-1), 0, atol=1e-5)


@pytest.mark.parametrize("kernel", ["reference", "blockwise"])
def test_rows_without_keys_are_zero(kernel: Any) -> None:
    """Their own values may be anything: nothing is taken from nothing, in no other row either."""
    module = layer(mask=masks.Causal() & masks.Lengths(np.array([T, 5]), np.array([T, 5])),
                   project_out=False, kernel=kernel)  # fmt: skip
    bad = X.copy()
    bad[1, 5:] = 1e9
    out = jax.jit(module.apply)(params_of(module), bad)
    np.testing.assert_array_equal(out[1, 5:], 0)
    assert np.isfinite(out[0]).all()


def test_first_token_of_a_causal_layer_is_zero() -> None:
    """A token that attends only to itself gets 0, and so does a head whose values are 0."""
    module = layer(project_out=False)
    params = params_of(module)
    edit = edits.Edit(keep=np.array([0.0, 1.0])[:, None])
    changed = edits.attach(module, params, {"attention_v": edit}, X)
    out, edited = jax.jit(lambda: [module.apply(v, X) for v in (params, changed)])()
    np.testing.assert_allclose(out[:, 0], 0, atol=1e-6)
    assert np.abs(out[:, 1:]).mean() > 0.1
    np.testing.assert_array_equal(edited.reshape(2, T, N, H)[:, :, : N // K], 0)


@pytest.mark.sampled(0.15)
@pytest.mark.parametrize(
    "cache", [CacheConfig(), CacheConfig("int8"), CacheConfig(slots=5)], ids=str
)
def test_decoding_takes_the_value_of_each_step(cache: CacheConfig) -> None:
    """The value itself, also where the cache rounds it."""
    mask = masks.Causal() & masks.Window(4, 0) if cache.slots else masks.Causal()
    whole = layer(mask=mask)
    params = params_of(whole)
    out = decoded(whole.clone(decode=True, cache=cache), params, X, steps=(5, *(1,) * (T - 5)))
    error = np.abs(out - jax.jit(whole.apply)(params, X)).max()
    assert error < (0.1 if cache.dtype == "int8" else 1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layer().init(KEY, X, X), "exclusive=True .* needs self-attention, got keys of"),
        (lambda: layer().init(KEY, X, kv=flax_mha.cache.Encoded(X)), "exclusive=True .* leave"),
        (lambda: flax_mha.variants.TalkingHeadsAttention(4, exclusive=True).init(KEY, X),
         "talking-heads attention has no exclusive"),
        (lambda: flax_mha.variants.DifferentialAttention(4, exclusive=True).init(KEY, X),
         "differential attention has no exclusive"),
    ],
)  # fmt: skip
def test_other_attention_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call)
