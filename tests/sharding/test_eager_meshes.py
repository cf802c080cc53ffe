"""Eager calls on a mesh: later calls, with other values of the same shapes, compile nothing.

Without this, each call outside jit compiles its programs anew, and JAX keeps all of them.
"""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

from flax_mha import MultiHeadAttention, analysis, masks, variants
from flax_mha.models.experts import Experts
from tests.support.meshes import KINDS, on
from tests.support.oracle import random_like
from tests.support.programs import compiled

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


@pytest.mark.sampled(0.018)
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
def test_later_calls_compile_nothing(name: str, kind: str) -> None:
    layer, rules = LAYERS[name]
    rng = np.random.default_rng(0)
    first, *others = rng.normal(size=(3, 2, 8, 16)).astype(np.float32)
    variables = random_like(jax.eval_shape(layer.init, KEY, first))
    expected = jax.jit(layer.apply)(variables, first)
    with on(kind, rules):
        np.testing.assert_allclose(layer.apply(variables, first), expected, atol=1e-5)
        for x in others:
            with compiled() as found:
                jax.block_until_ready(layer.apply(variables, x))
    assert not found


def test_later_calls_of_detect_compile_nothing() -> None:
    shape, pairs = (3, 2, 8, 16), {"previous": masks.Window(1, 0)}
    inputs = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    variables = random_like(jax.eval_shape(ATTENTION.init, KEY, inputs[0]))
    for x in inputs:
        with compiled() as found:
            jax.block_until_ready(analysis.detect(ATTENTION, variables, x, pairs=pairs))
    assert not found
