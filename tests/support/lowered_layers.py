"""A layer's gradient, lowered for devices that may be absent."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.common.counts.memory import shard_bytes
from flax_mha import MultiHeadAttention, sharding
from tests.support.meshes import described


class Traced(NamedTuple):
    """A layer on a mesh, its rows over "data" and its heads over "model".

    Attributes:
      gradient: the traced gradient of its parameters and input.
      forward: a function that lowers its output.
      parameters: the bytes of its parameters on a device.
    """

    gradient: Any
    forward: Callable[[], Any]
    parameters: int


class Residual(nn.Module):
    """x + layer(x), repeated with parameters of its own each time."""

    layer: nn.Module
    repeats: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the layers to x."""
        stack = nn.scan(
            lambda layer, x, _: (x + layer(x), None), variable_axes={"params": 0},
            split_rngs={"params": True}, length=self.repeats,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )  # fmt: skip
        return stack(self.layer, x, None)[0]


def traced(layer: MultiHeadAttention, mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> Traced:
    """Return the layer traced for inputs of this shape."""

    def loss(variables: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(layer.apply(variables, x).astype(jnp.float32)))

    with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
        variables = described(layer, jax.ShapeDtypeStruct(shape, dtype))
        x = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("data")))
        gradient = jax.jit(jax.grad(loss, (0, 1))).trace(variables, x)

    def forward() -> Any:
        with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
            return jax.jit(layer.apply).lower(variables, x)

    return Traced(gradient, forward, shard_bytes(variables))
