"""The layer's features beyond Flax's, against its formula in NumPy float64, and its laws."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import MultiHeadAttention
from flax_mha.masks import Causal, Lengths, Mask
from flax_mha.positions import Rotary
from tests.layer.test_flax_parity import normal
from tests.support import oracle
from tests.support.oracle import error, random_like

KEY = jax.random.key(0, impl="unsafe_rbg")  # Compiles in a tenth of the time of threefry.
# Float32 rounds at 6e-8; an output is four sums of at most 16 terms, a gradient twice as many.
OUTPUT, GRADIENT = 2e-6, 1e-5
B, T, S, N, D = 2, 4, 5, 4, 8
AT_Q, AT_K = np.arange(T)[:, None], np.arange(S)


X, Y, Z = normal(B, T, D), normal(B, S, 6, seed=2), normal(B, S, 7, seed=3)


def build(*inputs: Any, num_heads: int = N, **fields: Any) -> tuple[MultiHeadAttention, Any]:
    layer = MultiHeadAttention(num_heads, **fields)
    return layer, random_like(jax.eval_shape(layer.init, KEY, *inputs))


compiled = functools.cache(lambda layer: jax.jit(layer.apply))


def run(layer: MultiHeadAttention, params: Any, *inputs: Any, **call: Any) -> Any:
    """Run the layer, compiled once per layer and shapes unless arguments must be static."""
    if not call:
        return compiled(layer)(params, *inputs)
    return jax.jit(lambda *args: layer.apply(*args, **call))(params, *inputs)


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize(
    ("fields", "value", "out"),
    [
        ({"num_kv_heads": 2}, (2, 2), (4, 2, 8)),
        ({"num_kv_heads": 1, "use_bias": False}, (1, 2), (4, 2, 8)),
        ({"head_dim": 3, "v_head_dim": 5, "num_kv_heads": 2}, (2, 5), (4, 5, 8)),
        ({"use_bias": ("query", "value"), "normalize_qk": True, "head_dim": 8}, (4, 8), (4, 8, 8)),
        ({"use_bias": ("out",), "out_features": 3}, (4, 2), (4, 2, 3)),
        ({"project_out": False, "v_head_dim": 3}, (4, 3), None),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_fields_match_formula(fields: dict[str, Any], value: tuple, out: tuple | None) -> None:
    inputs = (X, Y, Z)
    layer, params = build(*inputs, **fields)
    projections = params["params"]
    assert projections["value"]["kernel"].shape[1:] == value
    assert (projections["out"]["kernel"].shape if "out" in projections else None) == out
    biased = fields.get("use_bias", True)
    biased = ("query", "key", "value", "out") if biased is True else biased or ()
    found = {name for name, each in projections.items() if "bias" in each}
    assert found == {*biased} & {*projections}
    expected, weights = oracle.multi_head(projections, *inputs)
    actual, actual_weights = run(layer, params, *inputs, return_weights=True)
    assert error(actual, expected) < OUTPUT
    assert error(actual_weights, weights) < OUTPUT


TABLE = np.random.default_rng(4).random((B, N, T, S)) < 0.5
ROWS = np.array([3, 0])
VALID = (ROWS[:, None, None] > AT_K)[:, None]
MASKS: dict[str, tuple[Mask | np.ndarray, np.ndarray]] = {
    "causal": (Causal(), AT_Q >= AT_K),
    "lengths": (Lengths(ROWS), VALID),
    "lengths of queries": (
        Lengths(ROWS, q=np.array([2, 4])),
        VALID & (np.array([2, 4])[:, None, None, None] > AT_Q),
    ),
    "algebra": ((Causal() | ~Lengths(ROWS)) & TABLE, ((AT_Q >= AT_K) | ~VALID) & TABLE),
}


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("name", MASKS)
def test_masks_match_formula_and_weights_sum_to_one(name: str) -> None:
    """Most have fully masked queries. Their weights sum to 0."""
    mask, allowed = MASKS[name]
    layer, params = build(X, Y, num_kv_heads=2)
    expected, weights = oracle.multi_head(params["params"], X, Y, allowed=allowed)
    (out, actual), sown = run(
        layer, params, X, Y, mask=mask, return_weights=True, sow_weights=True,
        mutable=["intermediates"],
    )  # fmt: skip
    assert error(out, expected) < OUTPUT
    assert error(actual, weights) < OUTPUT
    np.testing.assert_array_equal(sown["intermediates"]["attention_weights"][0], actual)
    sees = np.broadcast_to(allowed, TABLE.shape).any(-1)
    np.testing.assert_allclose(actual.sum(-1), sees, atol=1e-6)
    np.testing.assert_array_equal(actual[~np.broadcast_to(allowed, TABLE.shape)], 0)
    if name == "causal":
        np.testing.assert_array_equal(run(layer, params, X, Y, mask=mask), out)


def test_mask_field_mask_argument_and_bias_combine() -> None:
    layer, params = build(X, Y, mask=Causal())
    call = {"bias": normal(N, 1, S, seed=4), "allowed": VALID & (AT_Q >= AT_K)}
    expected, _ = oracle.multi_head(params["params"], X, Y, **call)
    out = run(layer, params, X, Y, mask=Lengths(ROWS), bias=call["bias"])
    assert error(out, expected) < OUTPUT


def test_rotary_takes_a_pair_of_positions() -> None:
    layer, params = build(X, Y, rotary=Rotary())
    at_q, at_k = np.array([5, 6, 7, 8]), np.array([[0, 1, 2, 3, 4], [9, 3, 1, 4, 0]])
    expected, _ = oracle.multi_head(
        params["params"], X, Y,
        turn=lambda q, k: (oracle.rotary(q, at_q), oracle.rotary(k, at_k)),
    )  # fmt: skip
    assert error(run(layer, params, X, Y, positions=(at_q, at_k)), expected) < OUTPUT


def test_causal_layer_has_no_gradient_from_later_tokens() -> None:
    """The gradient is exactly 0."""
    layer, params = build(X, mask=Causal(), rotary=Rotary())
    jacobian = jax.jit(jax.jacrev(lambda x: layer.apply(params, x)))(X[0])
    size = np.abs(jacobian).max((1, 3))  # [T, T]: of output i with respect to token j
    np.testing.assert_array_equal(size > 0, np.tril(np.ones((T, T), bool)))


@pytest.mark.sampled(0.12)
@pytest.mark.parametrize(
    ("mask", "seen"), [(Lengths(np.array([3, 3])), 3), (Causal(), T)], ids=["padding", "future"]
)
def test_masked_keys_do_not_leak(mask: Mask, seen: int) -> None:
    layer, params = build(X, Y)

    @jax.jit
    def outputs_and_gradients(x: jax.Array, y: jax.Array) -> Any:
        out, back = jax.vjp(
            lambda *xy: layer.apply(params, *xy, mask=mask, return_weights=True), x, y
        )
        return *back(out), *out

    clean = outputs_and_gradients(X, Y)
    for poison in (1e30, -1e30):
        bad = Y.copy()
        bad[:, seen:] = poison
        for actual, expected in zip(outputs_and_gradients(X, bad), clean, strict=True):
            np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(clean[1][:, seen:], 0)


TOKENS = 64
UNIFORM = {
    "num_heads": N, "head_dim": 1, "v_head_dim": TOKENS, "use_bias": False, "project_out": False,
    "dropout_rate": 0.25,
}  # fmt: skip


class Twice(nn.Module):
    """Two layers that output their weights after dropout, each [TOKENS, N, TOKENS]."""

    fields: dict[str, Any]

    @nn.compact
    def __call__(self, **call: Any) -> list[jax.Array]:
        layers = [MultiHeadAttention(**UNIFORM | dict(self.fields), name=name) for name in "ab"]
        return [layer(jnp.eye(TOKENS), **call).reshape(TOKENS, N, TOKENS) for layer in layers]


@functools.cache
def dropping(**fields: Any) -> Any:
    """Build a model with equal scores for all keys, and values that tell the keys apart."""
    kernels = {"query": np.zeros((TOKENS, N, 1)), "key": np.zeros((TOKENS, N, 1))}
    kernels["value"] = np.repeat(np.eye(TOKENS)[:, None], N, 1)
    layer = {name: {"kernel": jnp.asarray(kernel, jnp.float32)} for name, kernel in kernels.items()}
    params = {"params": {"a": layer, "b": layer}}
    model = Twice(fields)
    return jax.jit(lambda rng, **call: model.apply(params, rngs={"dropout": rng}, **call))


@pytest.mark.sampled(0.15)
def test_dropout_drops_share_and_scales_rest() -> None:
    """Submodules, heads and keys drop different weights."""
    run = dropping(deterministic=False)
    first, second = run(KEY)
    kept = np.isclose(first, 1 / TOKENS / 0.75, rtol=1e-6)
    np.testing.assert_array_equal(first[~kept], 0)
    # 4 standard deviations of the mean of 64·64·4 draws.
    assert abs(kept.mean() - 0.75) < 4 * (0.25 * 0.75 / kept.size) ** 0.5
    heads = kept.swapaxes(0, 1)
    for a, b in [(first, second), (heads[0], heads[1]), (first, run(jax.random.key(1))[0])]:
        # Independent masks agree in a share 0.75² + 0.25² = 0.625.
        assert 0.59 < np.mean((a > 0) == (b > 0)) < 0.66
    np.testing.assert_array_equal(first, run(KEY)[0])
    # A key in the call overrides the rngs of apply, and all layers use the same one.
    given_a, given_b = run(KEY, dropout_rng=jax.random.key(5))
    np.testing.assert_array_equal(given_a, given_b)
    assert (given_a != first).any()


@pytest.mark.sampled(0.15)
def test_broadcast_dropout_is_equal_across_heads() -> None:
    weights, _ = dropping(broadcast_dropout=True, deterministic=False)(KEY)
    np.testing.assert_array_equal(weights, np.repeat(weights[:, :1], N, 1))
    assert 0 < np.mean(weights == 0) < 1
    np.testing.assert_allclose(dropping(deterministic=True)(KEY), 1 / TOKENS, rtol=1e-6)
