"""What a layer over a pod's chips sends, by the compiler for TPUs, which needs no TPU."""

import importlib.util

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mha import MultiHeadAttention, masks, sharding
from tests.test_meshes import KINDS, collectives

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"), reason="needs the wheel libtpu"
)
POD = {"v5e": "v5e:4x4", "v5p": "v5p:2x2x2", "v6e": "v6e:4x4"}
SHAPE = (2, 1024, 256)


@pytest.mark.parametrize(
    ("kernel", "generation", "kind"),
    [("splash", generation, kind) for generation in POD for kind in KINDS]
    + [("flex", "v5e", "Explicit"), ("blockwise", "v5e", "Explicit")],
)
def test_heads_need_one_all_reduce_each_way(
    monkeypatch: pytest.MonkeyPatch, optimized: None, kernel: str, generation: str, kind: str
) -> None:
    layer = MultiHeadAttention(16, head_dim=64, mask=masks.Causal(), kernel=kernel)
    key = jax.eval_shape(lambda: jax.random.key(0))
    plain = layer.copy(kernel="reference")
    shapes = jax.eval_shape(lambda key: plain.init(key, jnp.zeros(SHAPE)), key)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")

    def create(key):
        return layer.init(key, jnp.zeros(SHAPE))

    def loss(variables, x):
        return jnp.sum(jnp.sin(layer.apply(variables, x)))

    topology = topologies.get_topology_desc(platform="tpu", topology_name=POD[generation])
    devices = np.array(topology.devices).reshape(1, -1)
    mesh = Mesh(devices, ("data", "model"), axis_types=(KINDS[kind],) * 2)
    with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
        shardings = sharding.of(create, key)
        variables = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            shapes, shardings,
        )  # fmt: skip
        x = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=NamedSharding(mesh, P("data")))
        forward = jax.jit(layer.apply).lower(variables, x).compile().as_text()
        both = jax.jit(jax.grad(loss, (0, 1))).lower(variables, x).compile().as_text()
    BTD = 4 * int(np.prod(SHAPE))
    assert collectives(forward) == [("all-reduce", BTD)]
    assert collectives(both) == [("all-reduce", BTD)] * 2
