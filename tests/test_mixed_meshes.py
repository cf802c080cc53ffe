"""Meshes of which some axes are Auto, others Explicit, and some perhaps Manual."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mha import Encoder, EncoderBlock, MultiHeadAttention, masks, sharding
from flax_mha.positions import Rotary
from tests.meshes import BACKWARD, EIGHT, FORWARD, FOUR, KEY, MIXED, X, changed, on
from tests.oracle import error

# Without biases: that of keys has the gradient 0, as the softmax takes no notice of it.
LAYER = MultiHeadAttention(8, num_kv_heads=4, use_bias=False, mask=masks.Causal(), rotary=Rotary())
ENCODER = Encoder(1, EncoderBlock(LAYER, 64, dropout_rate=0.1))
CASES: dict[str, tuple[nn.Module, Any]] = {
    "layer": (LAYER, sharding.RULES),
    "encoder": (ENCODER, changed(embed="data")),
    "heads and context": (LAYER, FOUR),
    "rows and context": (LAYER, EIGHT),
}


def gradients(model: nn.Module, params: Any, x: jax.Array) -> Any:
    def loss(params: Any, x: jax.Array) -> Any:
        y = model.apply(params, x, deterministic=False, rngs={"dropout": KEY})
        return jnp.sum(jnp.sin(y)), y

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)


@functools.cache
def on_one_device(model: nn.Module) -> tuple[Any, Any]:
    """Parameters, and the gradients and output."""
    params = jax.jit(model.init)(KEY, X)
    return params, gradients(model, params, X)


def hold(got: Any, wanted: Any) -> None:
    """Gradients and output of a loss are those of one device."""
    assert error(got[1], wanted[1]) < FORWARD
    for a, b in zip(jax.tree.leaves(got[0]), jax.tree.leaves(wanted[0]), strict=True):
        assert error(a, b) < BACKWARD


@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.parametrize("name", CASES)
def test_auto_and_explicit_trace(name: str, kind: str) -> None:
    model, rules = CASES[name]
    _, leave = on(kind, rules)
    try:
        params = jax.eval_shape(model.init, KEY, X)
        (_, dx), y = jax.eval_shape(functools.partial(gradients, model), params, X)
    finally:
        leave()
    assert dx.shape == y.shape == X.shape


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.parametrize("name", CASES)
def test_auto_and_explicit(name: str, kind: str) -> None:
    model, rules = CASES[name]
    _, wanted = on_one_device(model)
    mesh, leave = on(kind, rules)
    try:
        params = sharding.init(model, KEY, X)
        placed = jax.device_put(X, NamedSharding(mesh, P("data")))
        got = jax.device_get(gradients(model, params, placed))
    finally:
        leave()
    hold(got, wanted)
