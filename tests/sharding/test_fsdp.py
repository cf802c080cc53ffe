"""FSDP: kernels are gathered for their products, and their gradients reduce-scattered."""

import importlib.util
import math
from collections import Counter
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.plan.collectives import read
from flax_mha import EncoderBlock, MultiHeadAttention
from flax_mha import nnx as flax_mha_nnx
from flax_mha.positions import Rotary
from flax_mha.sharding import products
from tests.sharding.test_sharded_models import EXAMPLES, FSDP, ROWS
from tests.support.arrays import zeros
from tests.support.meshes import (
    BACKWARD,
    FORWARD,
    KINDS,
    RNG,
    collectives,
    compare,
    described,
    on,
)

X = zeros((8, 16, 32))
_GATHERED = pytest.mark.skipif(
    not products.SHARDED_SUBGROUPS, reason="left to XLA before jaxlib 0.11.2"
)


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("kind", KINDS)
def test_nnx_layer_matches_one_device(kind: str) -> None:
    layer = flax_mha_nnx.MultiHeadAttention(8, 32, rotary=Rotary(), rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    state = jax.tree.map(lambda x: RNG.normal(size=x.shape).astype(np.float32) / 4, state)

    def apply(state: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(x)

    bounds = 5 * FORWARD, 2 * BACKWARD
    compare(apply, (state, EXAMPLES), kind, FSDP, [P(), P(ROWS)], (2, 2, 2), bounds=bounds)


@_GATHERED
@pytest.mark.sampled(0.25, slow=0.2)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_reduce_scattered(optimized: None, kind: str) -> None:
    """Over d = m = f = 2 devices for rows, heads and features, P the kernels' bytes:

    all-gathers of P/m, reduce-scatters to P/(m·f), all-reduces of these over d.
    """
    d, m, f = 2, 2, 2
    layer = MultiHeadAttention(8, use_bias=False)
    mesh, leave = on(kind, FSDP, (d, m, f))
    try:
        params = described(layer, X)
        places = jax.tree.map(lambda x: x.sharding, params)

        def loss(params: Any, x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(layer.apply(params, x)))

        x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P(ROWS)))
        gradient = jax.jit(jax.grad(loss), out_shardings=places)
        text = gradient.lower(params, x).compile().as_text()
    finally:
        leave()
    kernels = 4 * sum(math.prod(w.shape) for w in jax.tree.leaves(params))
    sent: Counter[str] = Counter()
    for collective, size in collectives(text):
        sent[collective] += size
    output = X.nbytes // (d * f)  # The gradient of x is not asked for.
    assert sent == {
        "all-gather": kernels // m,
        "reduce-scatter": kernels // (m * f),
        "all-reduce": kernels // (m * f) + output,
    }


@_GATHERED
@pytest.mark.sampled(0)
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs the wheel libtpu")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_reduce_scattered_on_tpu(optimized: None, kind: str) -> None:
    """A block of 2,048 features over 4 devices for rows and 4 for features."""
    chips = np.array(topologies.get_topology_desc("v5e:4x4", "tpu").devices).reshape(4, 1, 4)
    mesh = Mesh(chips, ("data", "model", "group"), axis_types=(KINDS[kind],) * 3)
    layer = MultiHeadAttention(16, head_dim=128, use_bias=False, kernel="reference")
    block = EncoderBlock(layer, 4 * 2048)
    x = jax.ShapeDtypeStruct((16, 512, 2048), jnp.float32, sharding=NamedSharding(mesh, P(ROWS)))

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(block.apply(params, x)))

    with jax.set_mesh(mesh), nn.logical_axis_rules(FSDP):
        params = described(block, jax.ShapeDtypeStruct(x.shape, x.dtype))
        places = jax.tree.map(lambda a: a.sharding, params)
        program = jax.jit(jax.grad(loss), out_shardings=places).lower(params, x).compile()
    kernels = 4 * sum(math.prod(a.shape) for a in jax.tree.leaves(params))
    sent: Counter[str] = Counter()
    for one in read(program.as_text(), mesh.size):
        sent[one.kind] += one.bytes
    # Without the reduce-scatters, the all-reduces are those of all kernels.
    for kind in ("reduce-scatter", "all-reduce"):
        assert abs(sent[kind] - kernels / 4) < 0.05 * kernels / 4
