"""What models differ in: norms, biases and activations of blocks."""

import functools

import flax.linen as nn
import numpy as np
import pytest

from flax_mha import MLP, Encoder
from tests import oracle
from tests.oracle import error
from tests.test_blocks import OUTPUT, X, block, parameters, run


def test_functions_of_ones_own_as_activations() -> None:
    params = parameters(MLP(16), X)
    named = run(MLP(16, "gelu_exact"), params, X)
    given = run(MLP(16, functools.partial(nn.gelu, approximate=False)), params, X)
    np.testing.assert_array_equal(given, named)
    assert error(run(MLP(16, "gelu"), params, X), named) > 1e-5


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_the_epsilon_of_norms(norm: str) -> None:
    """Of the blocks, and of the norm at a stack's end."""
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
def test_biases_of_the_mlp_apart(mlp_bias: bool) -> None:
    module = block({"use_bias": not mlp_bias}, mlp_bias=mlp_bias)
    params = parameters(module, X)
    assert ("bias" in params["params"]["mlp"]["up"]) == mlp_bias
    assert ("bias" in params["params"]["attention"]["query"]) != mlp_bias
    assert error(run(module, params, X), oracle.encoder_block(params["params"], X)) < OUTPUT
