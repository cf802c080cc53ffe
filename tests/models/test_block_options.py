"""Blocks of any options, and stacks with their norms, against NumPy in float64."""

import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

from flax_mha import MLP, Encoder
from tests.models.test_blocks import (
    ALLOWED,
    MASK,
    OUTPUT,
    X,
    block,
    differentiate,
    normal,
    run,
)  # fmt: skip
from tests.support import oracle
from tests.support.arrays import random_variables
from tests.support.oracle import Params, error, float64


def test_activation_may_be_a_function() -> None:
    params = random_variables(MLP(16), X)
    named = run(MLP(16, "gelu_exact"), params, X)
    given = run(MLP(16, functools.partial(nn.gelu, approximate=False)), params, X)
    np.testing.assert_array_equal(given, named)
    assert error(run(MLP(16, "gelu"), params, X), named) > 1e-5


OWN_NORM = nn.LayerNorm(epsilon=0.02, use_bias=False)
# The norms before branches, and whether both branches read the same features.
PLACES = [
    (True, True), (True, False), (True, "own_norms"), (False, False),
    *itertools.product([("attention",), ("mlp",)], [False, "own_norms"]),
]  # fmt: skip
BLOCKS: list[dict[str, Any]] = [
    {}, {"norm": "rmsnorm", "activation": "silu", "gated": True},
    {"norm": "rmsnorm", "pre_norm": False}, {"norm_epsilon": 0.02},
    {"norm": "rmsnorm", "norm_epsilon": 0.02}, {"norm": OWN_NORM},
    {"mlp_bias": False}, {"use_bias": False, "mlp_bias": True},
    *({"output_scale": 0.5} | more for more in ({}, {"parallel": True}, {"pre_norm": False})),
    *(
        {"pre_norm": pre, "parallel": parallel, "branch_norm": branch, "layer_scale": 0.25}
        for (pre, parallel), branch in itertools.product(PLACES, [False, True])
    ),
]  # fmt: skip


def norm(params: Params, x: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    kind = options.get("norm", "layernorm")
    if isinstance(kind, str):
        return oracle.NORMS[kind](params, x, options.get("norm_epsilon", 1e-6))
    assert params.keys() == {"scale"}
    return oracle.layer_norm(params, x, kind.epsilon)


def expected_block(params: Params, x: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    """Compute a block with any placement of its norms, in float64."""
    pre, side_by_side = options.get("pre_norm", True), options.get("parallel", False)
    branch = options.get("branch_norm", False)

    def added(name: str, x: np.ndarray) -> np.ndarray:
        if name == "mlp":
            y = oracle.mlp(params[name], x, options.get("activation", "gelu"))
        else:
            y = oracle.multi_head(params[name], x, allowed=ALLOWED)[0]
        y = norm(params[f"{name}_branch_norm"], y, options) if branch else y
        return float64(params.get(f"{name}_scale", 1)) * y

    x = float64(x)
    for together in [("attention", "mlp")] if side_by_side else [("attention",), ("mlp",)]:
        norms = together if side_by_side == "own_norms" else together[:1] * len(together)
        normed = [pre is True or (isinstance(pre, tuple) and name in pre) for name in together]
        inputs = [
            norm(params[f"{name}_norm"], x, options) if is_normed else x
            for name, is_normed in zip(norms, normed, strict=True)
        ]
        x = x + sum(map(added, together, inputs))
        x = x if pre or branch else norm(params[f"{together[0]}_norm"], x, options)
    return x * float64(params.get("output_scale", 1))


@pytest.mark.sampled(0.048)
@pytest.mark.parametrize("options", BLOCKS)
def test_block_matches_formula(options: dict[str, Any]) -> None:
    """And the gradient of parameters and inputs is the slope of the output."""
    fields = {name: x for name, x in options.items() if name != "use_bias"}
    module = block({"use_bias": options.get("use_bias", True)}, **fields)
    params = random_variables(module, X)["params"]
    biased = options.get("mlp_bias", True), options.get("use_bias", True)
    assert ("bias" in params["mlp"]["up"], "bias" in params["attention"]["query"]) == biased
    out, gradients = differentiate(module, {"params": params}, X, mask=MASK)
    assert error(out, expected_block(params, X, options)) < OUTPUT
    rng, at = np.random.default_rng(5), (float64(params), float64(X))
    step = jax.tree.map(lambda x: 1e-6 * rng.normal(size=x.shape), at)
    ahead, behind = (
        expected_block(*jax.tree.map(lambda x, s: x + sign * s, at, step), options)  # noqa: B023
        for sign in (1, -1)
    )
    slope = np.vdot(ahead - behind, normal(*X.shape, seed=5)) / 2
    found = jax.tree.map(np.vdot, (gradients[0]["params"], gradients[1]), step)
    np.testing.assert_allclose(sum(jax.tree.leaves(found)), slope, rtol=2e-4)


def test_scales_start_at_their_values() -> None:
    module = block(layer_scale=0.25, output_scale=0.5)
    names = ("attention_scale", "mlp_scale", "output_scale")
    start = jax.jit(lambda: [module.init(jax.random.key(0), X)["params"][name] for name in names])
    for found, value in zip(start(), (0.25, 0.25, 0.5), strict=True):
        np.testing.assert_array_equal(found, np.full(found.shape, value))


@pytest.mark.sampled(0.072)
@pytest.mark.parametrize("options", [{}, {"pre_norm": False}, {"norm": OWN_NORM}])
@pytest.mark.parametrize("norms", [(True, False), (False, True), (True, None)])
def test_input_and_final_norms_of_stack(
    options: dict[str, Any], norms: tuple[bool, bool | None]
) -> None:
    first, last = norms
    stack = Encoder(1, block(**options), input_norm=first, final_norm=last)
    params = random_variables(stack, X)["params"]
    last = options.get("pre_norm", True) if last is None else last
    there = {"input_norm": first, "norm": last}
    assert params.keys() - {"layers_0"} == {name for name in there if there[name]}
    x = norm(params["input_norm"], float64(X), options) if first else X
    x = expected_block(params["layers_0"], x, options)
    x = norm(params["norm"], x, options) if last else x
    assert error(run(stack, {"params": params}, X, mask=MASK), x) < OUTPUT


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
