"""Factors of heads and branches in half precision, whose gradients are sums over all tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from flax_mha import EncoderBlock, MultiHeadAttention
from flax_mha.variants import DifferentialAttention
from tests.support.oracle import error

T, D = 256, 64
MODELS: dict[str, Any] = {
    "scales": lambda dtype: EncoderBlock(
        MultiHeadAttention(4, scale="learned", dtype=dtype), D, layer_scale=0.5, output_scale=0.5
    ),
    "differential": lambda dtype: DifferentialAttention(4, dtype=dtype),
}


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("name", MODELS)
@jax.numpy_dtype_promotion("standard")  # as Flax's norms need
def test_gradients_in_half_precision_match_float32(name: str, rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(8, T, D)), jnp.bfloat16)
    model = MODELS[name](jnp.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), x.astype(jnp.float32))
    variables = jax.tree.map(lambda y: 0.4 * rng.normal(size=y.shape).astype(y.dtype), shapes)

    def gradients(dtype: Any) -> Any:
        def loss(variables: Any, head_mask: jax.Array) -> jax.Array:
            out: Any = MODELS[name](dtype).apply(variables, x.astype(dtype), head_mask=head_mask)
            return (out.astype(jnp.float32) ** 2).mean()

        return jax.jit(jax.grad(loss, (0, 1)))(variables, jnp.ones(4))

    (found, by_head), (expected, expected_by_head) = map(gradients, ("bfloat16", "float32"))
    assert error(by_head, expected_by_head) < 0.03
    flat, wanted = (flatten_dict(y["params"], sep="/") for y in (found, expected))
    factors = [key for key in flat if "scale" in key or "lambda" in key]
    assert len(factors) == (6 if name == "scales" else 5)
    for key in factors:
        assert error(flat[key], wanted[key]) < 0.03, key
