"""nnx layers on meshes whose axes have a user's own names, as in Flax's tutorials."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import flax_mha.nnx
from flax_mha import masks

pytestmark = pytest.mark.slow
X = np.random.default_rng(0).normal(size=(4, 6, 16)).astype(np.float32)
# Flax's minigpt gives this initializer to all kernels of a layer.
KERNEL = nnx.with_partitioning(nnx.initializers.xavier_uniform(), (None, "model"))
BIAS = nnx.with_partitioning(nnx.initializers.zeros_init(), ("model",))


class Block(nnx.Module):
    """A residual attention layer of a language model."""

    def __init__(self, **fields: Any) -> None:
        self.attention = flax_mha.nnx.MultiHeadAttention(
            8, 16, mask=masks.Causal(), rngs=nnx.Rngs(0), **fields
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.attention(x)


def step(block: Block, x: jax.Array) -> Any:
    """Return the loss and its gradients by a new program, as rules are no part of JAX's keys."""

    def run(block: Block, x: jax.Array) -> Any:
        return nnx.value_and_grad(lambda block: jnp.sum(jnp.sin(block(x))))(block)

    return nnx.jit(run)(block, x)


def compare(rules: Any, types: AxisType, places: Any = ("batch",)) -> None:
    """Compare a step on a mesh with one on one device."""
    wanted, gradients = step(Block(kernel_init=nnx.initializers.xavier_uniform()), X)
    mesh = jax.make_mesh((4, 2), ("batch", "model"), axis_types=(types,) * 2)
    with jax.set_mesh(mesh), rules:
        block = Block(kernel_init=KERNEL, bias_init=BIAS)
        assert "model" in block.attention.query.kernel[...].sharding.spec
        found, grads = step(block, jax.device_put(X, jax.P(*places)))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    found, wanted = (jax.tree.leaves(nnx.to_pure_dict(x)) for x in (grads, gradients))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(jax.device_get(a), b, atol=2e-5)


def test_auto_axes_need_no_rules() -> None:
    compare(contextlib.nullcontext(), AxisType.Auto)
