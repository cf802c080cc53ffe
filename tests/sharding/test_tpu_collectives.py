"""Collectives of a layer on a TPU pod, counted by the TPU compiler without a TPU.

The numbers follow the formula in docs/sharding.md.
"""

import importlib.util

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh

from experiments.counts import work
from experiments.counts.hlo import Module
from experiments.plan import compiled
from experiments.plan.collectives import read
from flax_mha import MultiHeadAttention, masks
from tests.support import lowered_layers
from tests.support.meshes import KINDS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs the wheel libtpu"),
]
N, H, T, D, ROWS = 16, 64, 512, 256, 2  # rows per device


@pytest.mark.parametrize(
    ("kernel", "topology", "kind"),
    [
        ("auto", "v5e:4x4", "Auto"), ("auto", "v5p:4x4x4", "Explicit"),
        ("auto", "v6e:16x16", "Auto"), ("flex", "v5e:4x4", "Explicit"),
        ("blockwise", "v5e:4x4", "Explicit"),
    ],
)  # fmt: skip
def test_layer_sends_the_bytes_of_the_formula(
    optimized: None, kernel: str, topology: str, kind: str
) -> None:
    """Heads over 16 devices, rows over the other axis."""
    layer = MultiHeadAttention(N, head_dim=H, mask=masks.Causal(), kernel=kernel)
    chips = np.array(
        topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    ).reshape(-1, N)
    mesh = Mesh(chips, ("data", "model"), axis_types=(KINDS[kind],) * 2)
    traced, forward, parameters = lowered_layers.traced(
        layer, mesh, (ROWS * len(chips), T, D), jnp.float32
    )
    both, _ = compiled.dumped(traced.lower())
    if topology == "v5e:4x4":
        forward, _ = compiled.dumped(forward())
    BTD = 4 * ROWS * T * D
    found = read(both, mesh.size)
    over_heads = [one for one in found if set(one.groups[0]) == set(range(N))]
    over_rows = [one for one in found if set(one.groups[0]) == set(range(0, mesh.size, N))]
    assert len(over_heads) + len(over_rows) * (len(chips) > 1) == len(found)
    assert [(one.kind, one.bytes) for one in over_heads] == [("all-reduce", BTD)] * 2
    assert {one.kind for one in found} == {"all-reduce"}
    assert sum(one.bytes for one in over_rows) == parameters * (len(chips) > 1)
    if topology == "v5e:4x4":
        (one,) = read(forward, mesh.size)
        assert (one.kind, one.bytes, one.groups.shape) == ("all-reduce", BTD, (1, N))
    if kernel == "auto":
        # The kernel for those chips, though this machine has none. 12 matmuls of D by H per token:
        # 4 forward, each with two gradients.
        assert "splash_mha_fwd" in both
        assert work.flops(Module(both)) == 12 * 2 * ROWS * T * D * H
        assert work.pallas_flops(traced.jaxpr.jaxpr) > 9 * 2 * ROWS * T**2 * H / 2
