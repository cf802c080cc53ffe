"""What layers send over a mesh, counted in the compiled programs."""

import jax
import jax.numpy as jnp
import optax
import pytest

from flax_mha import (
    EncoderBlock,
    MultiHeadAttention,
    masks,
    sharding,
)
from flax_mha.positions import Rotary
from tests.meshes import KEY, KINDS, RNG, B, H, X, changed, collectives, on


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("K", "kernel"), [(8, "reference"), (8, "blockwise"), (1, "blockwise")])
def test_heads_need_one_all_reduce_each_way(optimized, K: int, kernel: str, kind: str) -> None:
    """Of B·T·D forward and of B·T·D backward, and nothing else."""
    layer = MultiHeadAttention(
        8, num_kv_heads=K, kernel=kernel, mask=masks.Causal(), rotary=Rotary()
    )

    def loss(params, x):
        return jnp.sum(jnp.sin(layer.apply(params, x)))

    _, leave = on(kind, shape=(1, 8))
    try:
        params = sharding.init(layer, KEY, X)
        forward = jax.jit(layer.apply).lower(params, X).compile().as_text()
        both = jax.jit(jax.grad(loss, (0, 1))).lower(params, X).compile().as_text()
    finally:
        leave()
    BTD = 4 * X.size
    assert collectives(forward) == [("all-reduce", BTD)]
    found = collectives(both)
    assert {kind for kind, _ in found} == {"all-reduce"}
    # One group's keys and values are on every device: their gradients are summed over devices.
    shared = 0 if K == 8 else 2 * 4 * B * 16 * H
    assert sum(size for _, size in found) == 2 * BTD + shared


@pytest.mark.parametrize("kind", KINDS)
def test_divided_norms_need_a_gather_and_a_scatter(optimized, kind: str) -> None:
    """For each half of a block, each way; the sums are scattered, not reduced for all."""
    block = EncoderBlock(MultiHeadAttention(8), 64)

    def loss(params, x):
        return jnp.sum(jnp.sin(block.apply(params, x)))

    _, leave = on(kind, changed(norm_length="model"), shape=(1, 8))
    try:
        params = sharding.init(block, KEY, X)
        forward = jax.jit(block.apply).lower(params, X).compile().as_text()
        both = jax.jit(jax.grad(loss, (0, 1))).lower(params, X).compile().as_text()
    finally:
        leave()
    whole, own = ("all-gather", 4 * X.size), ("reduce-scatter", 4 * X.size // 8)
    # The input and the output are those of the user: whole.
    assert collectives(forward)[:4] == [whole, own, whole, own]
    scattered = [found for found in collectives(both) if found[0] == "reduce-scatter"]
    assert scattered == [own] * 4
    # Parameters of norms and biases have their gradients summed over positions.
    rest = [size for kind, size in collectives(both) if kind == "all-reduce"]
    assert sum(rest) < X.size


def test_a_loss_over_a_divided_vocabulary_gathers_no_logits(optimized) -> None:
    logits, labels = jnp.asarray(RNG.normal(size=(B, 6, 64)), jnp.float32), jnp.ones((B, 6), int)

    def loss(logits: jax.Array) -> jax.Array:
        logits = sharding.constrain(logits, ("batch", "length", "vocab"))
        return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, 64)).mean()

    _, leave = on("Auto", shape=(1, 8))
    try:
        text = jax.jit(jax.grad(loss)).lower(logits).compile().as_text()
    finally:
        leave()
    found = collectives(text)
    assert {kind for kind, _ in found} == {"all-reduce"}
    assert sum(size for _, size in found) <= 4 * 3 * B * 6
