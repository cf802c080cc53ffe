"""The layer replaces `nn.MultiHeadDotProductAttention`: same parameters, numbers and errors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_mha import MultiHeadAttention
from tests.support.oracle import error, random_like

FlaxAttention = nn.MultiHeadDotProductAttention
KEY = jax.random.key(0)
# Float32 rounds at 6e-8. An output is four sums of at most 16 terms in another order than Flax's,
# a gradient about eight.
OUTPUT, GRADIENT = 2e-6, 1e-5
TRIANGLE = np.tril(np.ones((1, 1, 4, 4), bool))
Fn = Callable[..., Any]


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def lenient(fn: Fn) -> Fn:
    """Run fn with implicit promotion, which Flax relies on and these tests forbid."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return fn(*args, **kwargs)

    return run


def run(layer: nn.Module, *args: Any, **call: Any) -> Any:
    return jax.jit(layer.apply)(*args, **call)


def flat(tree: Any) -> dict[tuple[str, ...], Any]:
    return flax.traverse_util.flatten_dict(tree)


def pair(*inputs: Any, **fields: Any) -> tuple[FlaxAttention, MultiHeadAttention, Any]:
    """Build both layers and parameters for both, and check that their trees are equal."""
    theirs, ours = FlaxAttention(**fields), MultiHeadAttention(**fields)
    # Caches differ.
    shapes, own = (
        {"params": lenient(jax.eval_shape)(layer.init, KEY, *inputs)["params"]}
        for layer in (theirs, ours)
    )
    expected, actual = flat(shapes), flat(own)
    assert list(actual) == list(expected)
    for name, leaf in expected.items():
        assert (actual[name].shape, actual[name].dtype) == (leaf.shape, leaf.dtype), name
    return theirs, ours, random_like(shapes)


def assert_same_gradients(theirs: nn.Module, ours: nn.Module, params: Any, *inputs: Any) -> None:
    """Check the outputs, and the gradients with respect to parameters and inputs."""

    def both(layer: nn.Module) -> Any:
        out, back = jax.vjp(layer.apply, params, *inputs)
        return out, back(jnp.asarray(normal(*out.shape, seed=9)))

    out, grads = jax.jit(lambda: both(ours))()
    expected, expected_grads = lenient(jax.jit(lambda: both(theirs)))()
    assert error(out, expected) < OUTPUT
    # The key bias shifts all scores of a query equally, so its gradient is 0 up to rounding.
    # Compare with the largest gradient instead.
    size = max(np.linalg.norm(g) for g in jax.tree.leaves(expected_grads))
    for grad, wanted in zip(*map(jax.tree.leaves, (grads, expected_grads)), strict=True):
        assert np.linalg.norm(grad - wanted) < GRADIENT * size


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize(
    ("fields", "features"),
    [
        ({}, (8,)),
        ({"kernel_init": nn.initializers.normal(), "bias_init": nn.initializers.normal(),
          "out_kernel_init": nn.initializers.orthogonal(),
          "out_bias_init": nn.initializers.ones_init()}, (8, 6, 5)),
        ({"qkv_features": 4, "param_dtype": "bfloat16", "normalize_qk": True}, (8, 6)),
    ],
    ids=["default", "initializers", "bfloat16"],
)  # fmt: skip
def test_initial_values_are_bitwise_equal(
    fields: dict[str, Any], features: tuple[int, ...]
) -> None:
    inputs = [normal(3, D) for D in features]
    _, ours, _ = pair(*inputs, num_heads=2, **fields)
    # Half precision is cast from float32, of which Flax draws few numbers.
    theirs = pair(*inputs, num_heads=2, **fields | {"param_dtype": "float32"})[0]
    # XLA compiles threefry slowly: use it for one case only.
    key = jax.random.key(3, impl="unsafe_rbg") if fields else KEY
    actual, expected = (flat(lenient(layer.init)(key, *inputs)) for layer in (ours, theirs))
    for name, value in expected.items():
        drawn = value.astype(fields.get("param_dtype", "float32"))
        np.testing.assert_array_equal(actual[name], drawn, err_msg=str(name))


@pytest.mark.sampled(0.16)
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("attends", ["self", "cross", "distinct", "alike"])
def test_self_and_cross_attention_match_flax(batch: tuple[int, ...], attends: str) -> None:
    q, k, v = normal(*batch, 4, 8), normal(*batch, 5, 6, seed=2), normal(*batch, 5, 7, seed=3)
    alike = [normal(*batch, 4, 8, seed=seed) for seed in (1, 2, 3)]
    inputs = {"self": (q,), "cross": (q, k), "distinct": (q, k, v), "alike": alike}[attends]
    theirs, ours, params = pair(*inputs, num_heads=2)
    if batch == (3,):
        assert_same_gradients(theirs, ours, params, *inputs)
    else:
        assert error(run(ours, params, *inputs), run(theirs, params, *inputs)) < OUTPUT


@pytest.mark.sampled(0.16)
@pytest.mark.parametrize(
    "fields",
    [
        {"use_bias": False},
        {"qkv_features": 12},
        {"out_features": 5},
        {"normalize_qk": True},
        {"precision": "highest", "deterministic": True},
        {"num_heads": 1},
    ],
    ids=",".join,
)
def test_fields_match_flax(fields: dict[str, Any]) -> None:
    x = normal(2, 4, 8)
    assert_same_gradients(*pair(x, **{"num_heads": 4} | fields), x)


@pytest.mark.slow
@given(
    heads=st.integers(1, 4), head_dim=st.integers(1, 3), T=st.integers(1, 5), S=st.integers(1, 5),
    features=st.integers(1, 6), use_bias=st.booleans(), masked=st.booleans(),
)  # fmt: skip
@settings(max_examples=8)
def test_any_sizes_match_flax(
    heads: int, head_dim: int, T: int, S: int, features: int, use_bias: bool, masked: bool
) -> None:
    q, k = normal(T, 6), normal(S, features, seed=2)
    fields = {"num_heads": heads, "qkv_features": heads * head_dim, "use_bias": use_bias}
    theirs, ours, params = pair(q, k, **fields)
    mask = (normal(heads, T, S) > 0) | (np.arange(S) == 0) if masked else None
    out = run(ours, params, q, k, mask=mask)
    assert error(out, run(theirs, params, q, k, mask=mask)) < OUTPUT


@pytest.mark.sampled(0.33)
@pytest.mark.parametrize(
    "shape", [(), (5,), (4, 1), (3, 4, 5), (2, 1, 1, 5), (2, 3, 4, 5)], ids=str
)
def test_masks_of_all_broadcastable_shapes_match_flax(shape: tuple[int, ...]) -> None:
    mask = np.random.default_rng(1).random(shape) < 0.5
    # No query may be fully masked: there the layers differ (test_fully_masked_query_gives_zero).
    mask = mask | (np.arange(5) == 1) if shape[-1:] == (5,) else np.ones(shape, bool)
    q, k = normal(2, 4, 6), normal(2, 5, 6, seed=2)
    theirs, ours, params = pair(q, k, num_heads=3)
    expected = lenient(run)(theirs, params, q, k, mask=mask)
    assert error(run(ours, params, q, k, mask=mask), expected) < OUTPUT


# Flax computes the softmax in the compute dtype and we in float32, so they differ by the rounding
# of the former: 8 significand bits in bfloat16, 11 in float16. Both are compared with float32.
@pytest.mark.sampled(0.2)
@pytest.mark.parametrize(
    ("low", "which", "tolerance"),
    [("bfloat16", which, 2e-2) for which in ("dtype", "param_dtype", "inputs", "all")]
    + [("float16", "all", 2e-3)],
)
def test_low_precision_is_as_close_as_flax(low: str, which: str, tolerance: float) -> None:
    fields = {name: low for name in ("dtype", "param_dtype") if which in (name, "all")}
    x = normal(2, 4, 8).astype(low if which in ("inputs", "all") else "float32")
    theirs, ours, params = pair(x, num_heads=2, **fields)
    out, expected = lenient(run)(ours, params, x), lenient(run)(theirs, params, x)
    assert out.dtype == expected.dtype
    exact = run(FlaxAttention(2), *jax.tree.map(lambda a: a.astype("float32"), (params, x)))
    assert error(out, exact) < tolerance


def test_float64_matches_flax() -> None:
    with jax.enable_x64(True):
        x = normal(2, 4, 8).astype(np.float64)
        theirs, ours, params = pair(x, num_heads=2, param_dtype=jnp.float64)
        out, expected = (run(layer, params, x, mask=TRIANGLE) for layer in (ours, theirs))
        assert out.dtype == jnp.float64
        assert error(out, expected) < 1e-14  # a float32 intermediate would leave 1e-7


def test_sown_weights_match_flax() -> None:
    x = jnp.asarray(normal(2, 4, 8))
    theirs, ours, params = pair(x, num_heads=2)
    (out, sown), (_, expected) = (
        layer.apply(params, x, mask=TRIANGLE, sow_weights=True, mutable=["intermediates"])
        for layer in (ours, theirs)
    )
    assert jax.tree.structure(sown) == jax.tree.structure(expected)
    [weights], [expected_weights] = jax.tree.leaves(sown), jax.tree.leaves(expected)
    assert error(weights, expected_weights) < OUTPUT
    np.testing.assert_array_equal(out, ours.apply(params, x, mask=TRIANGLE))


def test_flax_checkpoint_loads_unchanged() -> None:
    x = normal(2, 4, 8)
    theirs, ours, params = pair(x, num_heads=2, normalize_qk=True)
    target = jax.tree.map(np.zeros_like, params)
    loaded = serialization.from_bytes(target, serialization.to_bytes(params))
    assert error(run(ours, loaded, x), run(theirs, params, x)) < OUTPUT


class Stack(nn.Module):
    """A layer inside a linen transformation."""

    layer: type[nn.Module]
    how: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        lift = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        if self.how == "scan":
            lifted = nn.scan(lambda layer, x, _: (layer(x), None), length=3, **lift)
            return lifted(self.layer(2, name="layer"), x, None)[0]
        transform = {"jit": nn.jit, "remat": nn.remat, "vmap": partial(nn.vmap, **lift)}[self.how]
        return transform(self.layer)(2, name="layer")(x)


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("how", ["jit", "vmap", "scan", "remat"])
def test_linen_transformations_match_flax(how: str) -> None:
    x = normal(3, 4, 8)
    theirs, ours = Stack(FlaxAttention, how), Stack(MultiHeadAttention, how)
    shapes = jax.eval_shape(theirs.init, KEY, x)
    assert jax.eval_shape(ours.init, KEY, x) == shapes
    params = random_like(shapes)
    assert error(run(ours, params, x), run(theirs, params, x)) < OUTPUT


def test_vmap_matches_batch_and_clone_changes_fields() -> None:
    x = normal(3, 4, 8)
    theirs, ours, params = pair(x, num_heads=2)
    rows = jax.vmap(lambda row: run(ours, params, row))(x)
    assert error(rows, run(theirs, params, x)) < OUTPUT
    np.testing.assert_array_equal(run(ours.clone(), params, x), run(ours, params, x))
    wider = jax.eval_shape(ours.clone(out_features=5).init, KEY, x)
    assert wider["params"]["out"]["kernel"].shape == (2, 4, 5)


@pytest.mark.sampled(0.13, slow=0.2)
def test_fully_masked_query_gives_zero_unlike_flax() -> None:
    """The documented difference: Flax averages the masked values."""
    x, mask = normal(4, 8), np.ones((1, 4, 4), bool)
    mask[:, 2] = False
    theirs, ours, params = pair(x, num_heads=2, use_bias=False)
    out, expected = (run(layer, params, x, mask=mask) for layer in (ours, theirs))
    np.testing.assert_array_equal(out[2], 0)
    assert np.linalg.norm(expected[2]) > 0.1
    assert error(np.delete(out, 2, 0), np.delete(expected, 2, 0)) < OUTPUT
    row = jax.grad(lambda *at: run(ours, *at, mask=mask)[2].sum(), argnums=(0, 1))(params, x)
    for gradient in jax.tree.leaves(row):
        np.testing.assert_array_equal(gradient, 0)
