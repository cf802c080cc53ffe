"""Keys and values shared between layers, against NumPy in float64 and by laws."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_mha
from flax_mha import MultiHeadAttention, QKNorm, masks
from flax_mha.cache import KeyValues
from flax_mha.positions import Rotary
from tests.support import oracle
from tests.support.oracle import error, float64, random_like

N, K, H, HV, D, T = 8, 4, 6, 4, 16, 9
KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, T, D)).astype(np.float32)
FIELDS: dict[str, Any] = {
    "num_kv_heads": K, "head_dim": H, "v_head_dim": HV, "rotary": Rotary(100.0), "use_bias": False,
    "qk_norm": QKNorm("rmsnorm"),
}  # fmt: skip
GIVER = MultiHeadAttention(N, mask=masks.Window(2, 0), **FIELDS)
TAKER = MultiHeadAttention(N, mask=masks.Causal(), **FIELDS)


class Pair(nn.Module):
    """A layer, and a second one that attends to its keys and values with another mask."""

    @nn.compact
    def __call__(self, x: jax.Array, **call: Any) -> jax.Array:
        y, kv = GIVER.copy(name="giver")(x, return_kv=True, **call)
        return TAKER.copy(name="taker")(y, kv=kv, **call)


def expected_output(params: Any, x: np.ndarray) -> np.ndarray:
    def rotated(name: str, params: Any, x: np.ndarray) -> np.ndarray:
        x = oracle.rms_norm(params[f"{name}_ln"], oracle.project(params[name], x))
        return oracle.rotary(x, np.arange(T), base=100.0)

    giver, taker, x = params["giver"], params["taker"], float64(x)
    k, v = rotated("key", giver, x), oracle.project(giver["value"], x)
    near = np.tri(T, dtype=bool) & ~np.tri(T, k=-3, dtype=bool)
    for layer, allowed in ((giver, near), (taker, np.tri(T, dtype=bool))):
        out, _, _ = oracle.attention(rotated("query", layer, x), k, v, allowed=allowed)
        x = oracle.project(layer["out"], out, contracted=2)
    return x


@functools.cache
def pair() -> Any:
    return random_like(jax.eval_shape(Pair().init, KEY, X))


@pytest.mark.sampled(0.08)
def test_shared_kv_matches_formula() -> None:
    """Gradients too, including the giver's projections, along one direction for each parameter."""
    variables = pair()
    params = variables["params"]
    assert params["giver"].keys() - params["taker"].keys() == {"key", "value", "key_ln"}
    cotangent = RNG.normal(size=X.shape)

    def loss(variables: Any) -> Any:
        out = Pair().apply(variables, X)
        return jnp.vdot(out, cotangent.astype(np.float32)), out

    grads, out = jax.jit(jax.grad(loss, has_aux=True))(variables)
    assert error(out, expected_output(params, X)) < 5e-6
    wide, step = float64(params), 1e-6
    for path, grad in jax.tree_util.tree_leaves_with_path(grads["params"]):
        way = RNG.normal(size=grad.shape)

        def along(size: float, path: Any = path, way: Any = way) -> float:
            moved = jax.tree_util.tree_map_with_path(
                lambda at, x: x + size * way if at == path else x, wide
            )
            return float(np.vdot(expected_output(moved, X), cotangent))

        slope = (along(step) - along(-step)) / (2 * step)
        assert np.vdot(grad, way) == pytest.approx(slope, rel=1e-4, abs=1e-3), path


@pytest.mark.sampled(0.08)
def test_shared_kv_with_padding_and_order() -> None:
    """Padding reaches no real token, and tokens may come in another order."""
    lengths, order = jnp.array([T, 5]), np.random.default_rng(1).permutation(T)
    apply = jax.jit(Pair().apply)
    whole = apply(pair(), X)
    bad = np.array(X)
    bad[1, 5:] = np.nan
    out = apply(pair(), bad, lengths=lengths)
    assert error(out[1, :5], whole[1, :5]) < 1e-6
    np.testing.assert_array_equal(out[1, 5:], 0)
    ordered = jax.jit(functools.partial(Pair().apply, order=order))(pair(), X[:, order])
    assert error(ordered[:, np.argsort(order)], whole) < 1e-6


@pytest.mark.sampled(0.08)
def test_kv_may_be_a_plain_pair_of_arrays() -> None:
    """The layer returns weights, keys and values on request, and takes keys from any source."""
    variables = {"params": pair()["params"]["giver"]}
    give = jax.jit(functools.partial(GIVER.apply, return_weights=True, return_kv=True))
    out, weights, kv = give(variables, X)
    assert isinstance(kv, KeyValues)
    assert kv.key.shape == (2, T, K, H)
    assert weights.shape == (2, N, T, T)
    again = jax.jit(GIVER.apply)(variables, X, kv=(kv.key, kv.value))
    np.testing.assert_array_equal(again, out)
    # Without a mask in the call, 3 shared tokens act like any other keys.
    plain = MultiHeadAttention(N, **FIELDS)
    found = jax.eval_shape(plain.apply, variables, X, kv=(kv.key[:, :3], kv.value[:, :3]))
    assert found.shape == (2, T, D)


@pytest.mark.sampled(0.08)
def test_nnx_shares_kv_like_linen() -> None:
    giver, taker = (
        flax_mha.nnx.MultiHeadAttention(
            N, D, mask=layer.mask, in_kv_features=own, rngs=nnx.Rngs(0), **FIELDS
        )
        for layer, own in ((GIVER, None), (TAKER, 0))
    )
    assert not any(hasattr(taker, name) for name in ("key", "value", "key_ln"))
    for layer, params in ((giver, pair()["params"]["giver"]), (taker, pair()["params"]["taker"])):
        for name, given in params.items():
            for leaf, value in given.items():
                getattr(getattr(layer, name), leaf).set_value(value)

    @nnx.jit(static_argnames="decode")
    def run(layers: Any, x: jax.Array, decode: bool = False) -> jax.Array:
        y, kv = layers[0](x, return_kv=True, decode=decode)
        return layers[1](y, kv=kv, decode=decode)

    expected = jax.jit(Pair().apply)(pair(), X)
    layers = nnx.List([giver, taker])
    np.testing.assert_allclose(run(layers, X), expected, atol=1e-6)
    for layer in layers:
        layer.init_cache(X.shape)
    assert taker.kv is None
    parts = [run(layers, x, decode=True) for x in (X[:, :8], X[:, 8:])]
    np.testing.assert_allclose(jnp.concatenate(parts, 1), expected, atol=1e-6)
