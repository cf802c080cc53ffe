"""Options of blocks and stacks: norms, biases and activations."""

import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from flax_mha import MLP, Encoder
from tests.models.test_blocks import OUTPUT, X, block, parameters, run
from tests.support import oracle
from tests.support.oracle import Params, error, float64


def test_activation_may_be_a_function() -> None:
    params = parameters(MLP(16), X)
    named = run(MLP(16, "gelu_exact"), params, X)
    given = run(MLP(16, functools.partial(nn.gelu, approximate=False)), params, X)
    np.testing.assert_array_equal(given, named)
    assert error(run(MLP(16, "gelu"), params, X), named) > 1e-5


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_norm_epsilon_reaches_every_norm(norm: str) -> None:
    """In the blocks, and at the end of a stack."""
    x = 0.1 * X
    module = block(norm=norm, norm_epsilon=0.02)
    params = parameters(module, x)
    expected = oracle.encoder_block(params["params"], x, norm=norm, epsilon=0.02)
    assert error(run(module, params, x), expected) < OUTPUT
    stack = Encoder(1, module)
    params = parameters(stack, x)["params"]
    inner = oracle.encoder_block(params["layers_0"], x, norm=norm, epsilon=0.02)
    expected = oracle.NORMS[norm](params["norm"], inner, 0.02)
    assert error(run(stack, {"params": params}, x), expected) < OUTPUT


@pytest.mark.parametrize("mlp_bias", [True, False])
def test_mlp_bias_is_independent_of_attention_bias(mlp_bias: bool) -> None:
    module = block({"use_bias": not mlp_bias}, mlp_bias=mlp_bias)
    params = parameters(module, X)
    assert ("bias" in params["params"]["mlp"]["up"]) == mlp_bias
    assert ("bias" in params["params"]["attention"]["query"]) != mlp_bias
    assert error(run(module, params, X), oracle.encoder_block(params["params"], X)) < OUTPUT


def expected_block(params: Params, x: np.ndarray, pre: Any, branch: bool, side_by_side: Any) -> Any:
    """Compute a block with any placement of its norms, in float64."""

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        return oracle.layer_norm(params[name], x)

    def added(name: str, x: np.ndarray) -> np.ndarray:
        is_mlp = name == "mlp"
        y = oracle.mlp(params[name], x) if is_mlp else oracle.multi_head(params[name], x)[0]
        return float64(params[f"{name}_scale"]) * (norm(f"{name}_branch_norm", y) if branch else y)

    x = float64(x)
    for together in [("attention", "mlp")] if side_by_side else [("attention",), ("mlp",)]:
        norms = together if side_by_side == "own_norms" else together[:1] * len(together)
        normed = [pre is True or (isinstance(pre, tuple) and name in pre) for name in together]
        pairs = zip(norms, normed, strict=True)
        inputs = [norm(f"{name}_norm", x) if is_normed else x for name, is_normed in pairs]
        x = x + sum(map(added, together, inputs))
        x = x if pre or branch else norm(f"{together[0]}_norm", x)
    return x


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("branch", [True, False])
@pytest.mark.parametrize(
    ("pre", "side_by_side"),
    [
        (True, True), (True, False), (True, "own_norms"), (False, False),
        *itertools.product([("attention",), ("mlp",)], [False, "own_norms"]),
    ],
)  # fmt: skip
def test_norm_placements_match_formula(pre: Any, branch: bool, side_by_side: Any) -> None:
    """And the gradient is the slope of the output."""
    module = block(pre_norm=pre, branch_norm=branch, parallel=side_by_side, layer_scale=0.5)
    params = parameters(module, X)

    def expected(x: np.ndarray) -> np.ndarray:
        return expected_block(params["params"], x, pre, branch, side_by_side)

    assert error(run(module, params, X), expected(X)) < OUTPUT
    last = parameters(Encoder(1, module), X)["params"].keys() - {"layers_0"}
    assert last == ({"norm"} if pre or branch else set())
    rng = np.random.default_rng(5)
    cotangent, step = rng.normal(size=X.shape), rng.normal(size=X.shape)
    gradient = jax.grad(lambda x: jnp.vdot(module.apply(params, x), cotangent))(jnp.asarray(X))
    difference = expected(float64(X) + 1e-6 * step) - expected(float64(X) - 1e-6 * step)
    slope = np.vdot(difference, cotangent) / 2e-6
    np.testing.assert_allclose(np.vdot(float64(gradient), step), slope, rtol=2e-4)


@pytest.mark.sampled(0.13, slow=0.2)
@pytest.mark.parametrize("fields", [{}, {"parallel": True}, {"pre_norm": False}])
def test_output_scale_multiplies_the_block(fields: dict[str, Any]) -> None:
    """With its gradient: the output is linear in it."""
    module = block(output_scale=0.5, **fields)
    start = jax.jit(lambda: module.init(jax.random.key(0), X)["params"]["output_scale"])
    np.testing.assert_array_equal(start(), [0.5])
    params = parameters(module, X)
    rest = {"params": {k: x for k, x in params["params"].items() if k != "output_scale"}}
    plain = np.asarray(run(block(**fields), rest, X))
    expected = params["params"]["output_scale"] * plain
    np.testing.assert_allclose(run(module, params, X), expected, rtol=1e-6)
    gradient = jax.grad(lambda given: jnp.vdot(module.apply(given, X), plain))(params)["params"]
    np.testing.assert_allclose(gradient["output_scale"][0], np.vdot(plain, plain), rtol=1e-5)


def test_layer_scale_starts_at_its_value() -> None:
    module, names = block(layer_scale=0.25), ("attention_scale", "mlp_scale")
    start = jax.jit(lambda: [module.init(jax.random.key(0), X)["params"][name] for name in names])
    np.testing.assert_array_equal(start(), np.full((2, X.shape[-1]), 0.25))


@pytest.mark.sampled(0.13, slow=0.2)
def test_norm_may_be_a_module() -> None:
    """Each norm is a copy of it, including the stack's."""
    own = nn.LayerNorm(epsilon=0.02, use_bias=False)
    stack = Encoder(2, block(norm=own), input_norm=True)
    params = parameters(stack, X)["params"]
    named = Encoder(2, block(norm="layernorm", norm_epsilon=0.02), input_norm=True)
    paths = {k: v for k, v in flatten_dict(params).items() if "norm" in str(k)}
    assert len(paths) == 6
    assert {path[-1] for path in paths} == {"scale"}
    norms = {(*path[:-1], "bias"): np.zeros_like(scale) for path, scale in paths.items()}
    with_biases = unflatten_dict(flatten_dict(params) | norms)
    expected = run(named, {"params": with_biases}, X)
    assert error(run(stack, {"params": params}, X), expected) < OUTPUT


@pytest.mark.sampled(0.16)
@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize("norms", [(True, False), (False, True), (True, None)])
def test_input_and_final_norms_of_stack(pre_norm: bool, norms: tuple[bool, bool | None]) -> None:
    first, last = norms
    stack = Encoder(1, block(pre_norm=pre_norm), input_norm=first, final_norm=last)
    params = parameters(stack, X)["params"]
    last = pre_norm if last is None else last
    there = {"input_norm": first, "norm": last}
    assert params.keys() - {"layers_0"} == {name for name in there if there[name]}
    x = oracle.layer_norm(params["input_norm"], X) if first else X
    x = oracle.encoder_block(params["layers_0"], x, pre_norm=pre_norm)
    x = oracle.layer_norm(params["norm"], x) if last else x
    assert error(run(stack, {"params": params}, X), x) < OUTPUT


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"norm": nn.LayerNorm}, "norm must be one of .* got .*LayerNorm"),
        ({"branch_norm": 1}, "branch_norm must be True or False"),
        ({"parallel": "own"}, "parallel must be False, or with pre_norm .* got 'own'"),
        ({"parallel": "own_norms", "pre_norm": False}, "or with pre_norm True or 'own_norms', got"),
        ({"pre_norm": ("mpl",)}, r"a tuple of branches, of \['attention', 'mlp'\], got \('mpl',\)"),
    ],
)
def test_invalid_block_options_raise(fields: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        jax.eval_shape(block(**fields).init, jax.random.key(0), X)
