"""Eager calls on a mesh: later calls, with other values of the same shapes, compile nothing.

Without this, each call outside jit compiles its programs anew, and JAX keeps all of them.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from flax_mha import MultiHeadAttention, analysis, masks, variants
from flax_mha.models.experts import Experts

_compiled: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: _compiled.append(event) if "backend_compile" in event else None
)
KEY, ATTENTION = jax.random.key(0), MultiHeadAttention(4, num_kv_heads=2, mask=masks.Causal())
FSDP = (("batch", "data"), ("embed", "data"), ("heads", "model"), ("mlp", "model"))
TENSOR = (("batch", "data"), ("heads", "model"), ("norm_length", "model"))
EXPERTS = (("batch", "data"), ("experts", "model"))
CHOSEN = variants.ChosenBlocksAttention(4, block=4, count=2)
LAYERS: dict[str, tuple[nn.Module, Any]] = {
    "kernels sharded by FSDP": (ATTENTION, FSDP),
    "sequence parallelism": (ATTENTION.clone(num_kv_heads=4), TENSOR),
    "shared heads": (ATTENTION, TENSOR[:2]),
    "ring": (ATTENTION.clone(kernel="ring"), (("batch", "data"), ("length", "model"))),
    "talking heads": (variants.TalkingHeadsAttention(4), TENSOR[:2]),
    "experts": (Experts(num_experts=4, hidden=8, top_k=2), EXPERTS),
    "chosen blocks": (CHOSEN, TENSOR[:2]),
}


def compilations(call: Callable[[jax.Array], Any]) -> int:
    """Return the number of compilations of the third call."""
    for seed in range(3):
        x = np.random.default_rng(seed).normal(size=(2, 8, 16))
        _compiled.clear()
        jax.block_until_ready(call(jnp.asarray(x, jnp.float32)))
    return len(_compiled)


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", LAYERS)
def test_later_calls_compile_nothing(name: str, kind: AxisType) -> None:
    layer, rules = LAYERS[name]
    variables = layer.init(KEY, jnp.ones((2, 8, 16)))
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        assert compilations(lambda x: layer.apply(variables, x)) == 0


def test_later_calls_of_detect_compile_nothing() -> None:
    variables = ATTENTION.init(KEY, jnp.ones((2, 8, 16)))
    pairs = {"previous": masks.Window(1, 0)}
    assert compilations(lambda x: analysis.detect(ATTENTION, variables, x, pairs=pairs)) == 0
