"""The nnx variants: parameters, outputs, gradients and decoding equal the linen layers'."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_mha.nnx
from flax_mha import CacheConfig, masks, variants
from flax_mha.positions import Rotary
from tests.support.oracle import random_like

B, T, D = 2, 6, 16
X = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
FIELDS: dict[str, dict[str, Any]] = {
    "MultiHeadLatentAttention": {
        "head_dim": 4, "kv_rank": 6, "rope_dim": 2, "q_rank": 5, "rotary": Rotary(), "sinks": True,
        "mask": masks.Causal(),
    },
    "DifferentialAttention": {"num_kv_heads": 2, "offset": 0.6, "mask": masks.Causal()},
    "ForgettingAttention": {"scale": "learned", "sinks": True, "gate": "head"},
    "TalkingHeadsAttention": {"num_kv_heads": 2, "normalize_qk": True, "mask": masks.Causal()},
    "ChosenBlocksAttention": {"block": 2, "count": 2, "rotary": Rotary()},
}  # fmt: skip


def test_defaults_of_nnx_variants_are_those_of_linen() -> None:
    """Only layers that replace Flax's have its default of `broadcast_dropout`."""
    for name in FIELDS:
        linen, ours = (
            {field.name: field.default for field in dataclasses.fields(kind)}
            for kind in (getattr(variants, name), getattr(flax_mha.nnx, name).kind)
        )
        shared = linen.keys() & ours.keys() - {"decode"}  # None in nnx: given by the call
        assert {key: linen[key] for key in shared} == {key: ours[key] for key in shared}, name
        assert ours["broadcast_dropout"] is False
    replaced = (flax_mha.MultiHeadDotProductAttention, flax_mha.nnx.MultiHeadAttention.kind)
    assert all(layer.broadcast_dropout for layer in (*replaced, flax_mha.SelfAttention))
    assert not flax_mha.MultiHeadAttention.broadcast_dropout


@pytest.mark.sampled(0.06)
@pytest.mark.parametrize("name", FIELDS)
def test_nnx_variant_equals_linen_variant(name: str) -> None:
    """Bitwise, with random values for the parameters that start at 0."""
    linen = getattr(variants, name)(4, **FIELDS[name])
    ours = getattr(flax_mha.nnx, name)(4, D, rngs=nnx.Rngs(0), **FIELDS[name])
    shapes = jax.eval_shape(linen.init, jax.random.key(0), X)["params"]
    drawn = nnx.to_pure_dict(nnx.state(ours, nnx.Param))
    assert jax.tree.map(jnp.shape, drawn) == jax.tree.map(jnp.shape, shapes)
    params = random_like(shapes)
    nnx.update(ours, nnx.State(params))

    def loss(params: Any) -> jax.Array:
        return (linen.apply({"params": params}, X) ** 2).sum()

    expected = jax.jit(jax.value_and_grad(loss))(params)
    value, grads = nnx.jit(nnx.value_and_grad(lambda layer: (layer(X) ** 2).sum()))(ours)
    jax.tree.map(np.testing.assert_array_equal, (value, nnx.to_pure_dict(grads)), expected)
    ours.init_cache(X.shape)
    decoding = linen.clone(decode=True, cache=CacheConfig(dtype=jnp.float32))
    cache = jax.jit(decoding.init)(jax.random.key(0), X)["cache"]
    jax.tree.map(np.testing.assert_array_equal, nnx.as_pure(ours.kv), cache["kv"])

    @jax.jit
    def step(cache: Any, x: jax.Array) -> Any:
        return decoding.apply({"params": params, "cache": cache}, x, mutable="cache")

    call = nnx.jit(lambda layer, x: layer(x, decode=True))
    for at in (slice(0, 1), slice(1, 2)):
        out, changed = step(cache, X[:, at])
        cache = changed["cache"]
        np.testing.assert_array_equal(call(ours, X[:, at]), out)
