"""Projections of short sequences on TPUs, whose product has one axis for heads and features."""

import contextlib
from typing import Any

import jax
import pytest

from flax_mha import MultiHeadAttention, positions, sharding
from flax_mha.layer import linear
from tests.support.meshes import GROUPED, KEY, KINDS, X, on
from tests.support.oracle import error, random_like
from tests.support.platforms import pretend

SHAPES = {"one device": (), "two axes": (2, 4), "heads over two axes": (2, 2, 2)}


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_flat_heads_match_the_einsum(monkeypatch, shape: str, kind: str) -> None:
    """Outputs, and gradients of all parameters, on meshes too."""
    layer = MultiHeadAttention(
        8, num_kv_heads=2, qkv_features=32, kernel="reference", rotary=positions.Rotary()
    )
    variables = random_like(jax.eval_shape(layer.init, KEY, X))

    def loss(variables: Any, x: jax.Array) -> Any:
        out = layer.apply(variables, x)
        return (out**2).sum(), out

    def gradients() -> Any:
        # A new function, as jit keeps the program of another platform.
        lowered = jax.jit(lambda *args: jax.value_and_grad(loss, (0, 1), has_aux=True)(*args))
        lowered = lowered.lower(variables, X)
        return lowered.compile()(variables, X), lowered.as_text()

    want, text = gradients()
    assert "32x32xf32" not in text
    pretend(monkeypatch, "tpu")
    monkeypatch.setattr(linear, "SHORTEST", X.shape[-2])
    rules = GROUPED if len(SHAPES[shape]) == 3 else sharding.RULES
    with on(kind, rules, SHAPES[shape]) if SHAPES[shape] else contextlib.nullcontext():
        got, text = gradients()
    assert "32x32xf32" in text
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert error(x, y) < 1e-5
