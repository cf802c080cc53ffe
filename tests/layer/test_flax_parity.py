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


def both(fn: Fn, *layers: nn.Module) -> list[Any]:
    """Return fn of each layer, computed by one program."""
    return lenient(jax.jit(lambda: [fn(layer) for layer in layers]))()


INITIAL: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "default": ({}, (8,)),
    "initializers": (
        {"kernel_init": nn.initializers.normal(), "bias_init": nn.initializers.normal(),
         "out_kernel_init": nn.initializers.orthogonal(),
         "out_bias_init": nn.initializers.ones_init()}, (8, 6, 5),
    ),
    "bfloat16": ({"qkv_features": 4, "param_dtype": "bfloat16", "normalize_qk": True}, (8, 6)),
}  # fmt: skip


@pytest.mark.parametrize("name", INITIAL)
def test_initial_values_are_bitwise_equal(name: str) -> None:
    fields, features = INITIAL[name]
    inputs = [normal(3, D) for D in features]
    _, ours, _ = pair(*inputs, num_heads=2, **fields)
    # Half precision is cast from float32, of which Flax draws few numbers.
    theirs = pair(*inputs, num_heads=2, **fields | {"param_dtype": "float32"})[0]
    # XLA compiles threefry slowly: use it for one case only.
    key = jax.random.key(3, impl="unsafe_rbg") if fields else KEY
    actual, expected = map(flat, both(lambda layer: layer.init(key, *inputs), ours, theirs))
    for path, value in expected.items():
        drawn = value.astype(fields.get("param_dtype", "float32"))
        np.testing.assert_array_equal(actual[path], drawn, err_msg=str(path))


ALIKE = tuple(normal(3, 4, 8, seed=seed) for seed in (1, 2, 3))
INPUTS = normal(2, 4, 8), normal(2, 5, 6, seed=2), normal(2, 5, 7, seed=3)
CASES: dict[str, tuple[tuple[np.ndarray, ...], dict[str, Any]]] = {
    "self": (INPUTS[:1], {}),
    "no batch": ((INPUTS[0][0], INPUTS[1][0]), {}),
    "two batch axes": (tuple(x[None] for x in INPUTS), {}),
    "alike": (ALIKE, {}),
    "no bias": (INPUTS[:1], {"use_bias": False}),
    "qkv_features": (INPUTS[:1], {"qkv_features": 12, "num_heads": 3}),
    "out_features": (INPUTS[:2], {"out_features": 5}),
    "normalize_qk": (INPUTS[:1], {"normalize_qk": True}),
    "precision": (INPUTS[:1], {"precision": "highest", "deterministic": True}),
    "one head": (INPUTS[:1], {"num_heads": 1}),
}
SHAPES = ((), (5,), (4, 1), (3, 4, 5), (2, 1, 1, 5), (2, 3, 4, 5))


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize(
    ("name", "shape"), [*((name, None) for name in CASES), *(("qkv_features", x) for x in SHAPES)]
)
def test_outputs_and_gradients_match_flax(name: str, shape: tuple[int, ...] | None) -> None:
    """With all fields, inputs, and masks of all shapes that broadcast."""
    inputs, fields = CASES[name]
    mask = None
    if shape is not None:
        # Cross-attention of queries that may all see a key: else the layers differ.
        inputs = INPUTS[:2]
        mask = np.random.default_rng(1).random(shape) < 0.5
        mask = mask | (np.arange(5) == 1) if shape[-1:] == (5,) else np.ones(shape, bool)
    theirs, ours, params = pair(*inputs, **{"num_heads": 2} | fields)

    def pulled(layer: nn.Module) -> Any:
        out, pull = jax.vjp(lambda *args: layer.apply(*args, mask=mask), params, *inputs)
        return out, pull(jnp.sin(out))

    (out, grads), (expected, expected_grads) = both(pulled, ours, theirs)
    assert error(out, expected) < OUTPUT
    # The key bias shifts all scores of a query equally, so its gradient is 0 up to rounding.
    # Compare with the largest gradient instead.
    size = max(np.linalg.norm(g) for g in jax.tree.leaves(expected_grads))
    for grad, wanted in zip(*map(jax.tree.leaves, (grads, expected_grads)), strict=True):
        assert np.linalg.norm(grad - wanted) < GRADIENT * size


# Flax computes the softmax in the compute dtype and we in float32, so they differ by the rounding
# of the former: 8 significand bits in bfloat16, 11 in float16. Both are compared with float32.
@pytest.mark.sampled(0.12)
@pytest.mark.parametrize(
    ("low", "which", "tolerance"),
    [("bfloat16", which, 2e-2) for which in ("dtype", "param_dtype", "inputs", "all")]
    + [("float16", "all", 2e-3)],
)
def test_low_precision_is_as_close_as_flax(low: str, which: str, tolerance: float) -> None:
    fields = {name: low for name in ("dtype", "param_dtype") if which in (name, "all")}
    x = normal(2, 4, 8).astype(low if which in ("inputs", "all") else "float32")
    theirs, ours, params = pair(x, num_heads=2, **fields)
    out, expected = both(lambda layer: layer.apply(params, x), ours, theirs)
    assert out.dtype == expected.dtype
    exact = jax.jit(FlaxAttention(2).apply)(
        *jax.tree.map(lambda a: a.astype("float32"), (params, x))
    )
    assert error(out, exact) < tolerance


def test_float64_matches_flax() -> None:
    with jax.enable_x64(True):
        x = normal(2, 4, 8).astype(np.float64)
        theirs, ours, params = pair(x, num_heads=2, param_dtype=jnp.float64)
        out, expected = both(lambda layer: layer.apply(params, x, mask=TRIANGLE), ours, theirs)
        assert out.dtype == jnp.float64
        assert error(out, expected) < 1e-14  # a float32 intermediate would leave 1e-7


def test_sown_weights_and_checkpoints_match_flax() -> None:
    """Values and names, and a checkpoint of Flax's layer loads in ours."""
    x = normal(2, 4, 8)
    theirs, ours, params = pair(x, num_heads=2, normalize_qk=True)
    target = jax.tree.map(np.zeros_like, params)
    loaded = serialization.from_bytes(target, serialization.to_bytes(params))

    def sown(layer: nn.Module) -> Any:
        call = {"mask": TRIANGLE, "sow_weights": True, "mutable": ["intermediates"]}
        return layer.apply(loaded, x, **call)

    actual, expected = both(sown, ours, theirs)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for found, wanted in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert error(found, wanted) < OUTPUT


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


@pytest.mark.sampled(0.15)
@pytest.mark.parametrize("how", ["jit", "vmap", "scan", "remat"])
def test_linen_transformations_match_flax(how: str) -> None:
    x = normal(3, 4, 8)
    theirs, ours = Stack(FlaxAttention, how), Stack(MultiHeadAttention, how)
    shapes = jax.eval_shape(theirs.init, KEY, x)
    assert jax.eval_shape(ours.init, KEY, x) == shapes
    params = random_like(shapes)
    assert error(*both(lambda layer: layer.apply(params, x), ours, theirs)) < OUTPUT


def test_fully_masked_query_gives_zero_unlike_flax() -> None:
    """The documented difference: Flax averages the masked values."""
    x, mask = normal(4, 8), np.ones((1, 4, 4), bool)
    mask[:, 2] = False
    theirs, ours, params = pair(x, num_heads=2, use_bias=False)

    def pulled(layer: nn.Module) -> Any:
        def row(*args: Any) -> Any:
            out = layer.apply(*args, mask=mask)
            return out[2].sum(), out

        return jax.grad(row, (0, 1), has_aux=True)(params, x)

    (gradients, out), (_, expected) = both(pulled, ours, theirs)
    np.testing.assert_array_equal(out[2], 0)
    assert np.linalg.norm(expected[2]) > 0.1
    assert error(np.delete(out, 2, 0), np.delete(expected, 2, 0)) < OUTPUT
    for gradient in jax.tree.leaves(gradients):
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize(
    ("leaf", "told"), [(None, "None"), ({"value": KEY}, r"a dict with \['value'")]
)
def test_parameters_that_are_no_arrays_raise(leaf: Any, told: str) -> None:
    """As Orbax restores boxes, and stored Nones."""
    layer = nn.Sequential([MultiHeadAttention(2)])
    variables = layer.init(KEY, normal(1, 4, 8))
    variables["params"]["layers_0"]["query"]["bias"] = leaf
    with pytest.raises(TypeError, match=f"layers_0/query/bias must be an array, got {told}.*unbox"):
        layer.apply(variables, normal(1, 4, 8))
