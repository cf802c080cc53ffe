"""The kernel of short sequences in the nnx layer, interpreted."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from flax_mha.masks import Causal
from flax_mha.nnx import MultiHeadAttention
from flax_mha.positions import Rotary
from tests.support.oracle import error

X = jax.random.normal(jax.random.key(1), (2, 6, 16))


@pytest.mark.slow
def test_nnx_layer_has_gradients_of_reference(tpu: None) -> None:
    """Outputs match too."""

    def gradients(kernel: str) -> list[jax.Array]:
        layer = MultiHeadAttention(
            4, 16, num_kv_heads=2, rotary=Rotary(), kernel=kernel, decode=False, rngs=nnx.Rngs(3)
        )
        leaves, tree = jax.tree.flatten(nnx.state(layer, nnx.Param))
        keys = jax.random.split(jax.random.key(0), len(leaves))
        drawn = [jax.random.normal(key, x.shape) / 4 for key, x in zip(keys, leaves, strict=True)]
        nnx.update(layer, jax.tree.unflatten(tree, drawn))

        def loss(layer: Any, x: jax.Array) -> Any:
            out = layer(x, mask=Causal())
            return jnp.sum(out**2), out

        slope = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, out), (of_parameters, of_x) = nnx.jit(slope)(layer, X)
        return [out, of_x, *jax.tree.leaves(of_parameters)]

    for got, want in zip(gradients("short"), gradients("reference"), strict=True):
        assert error(got, want) < 1e-5
