"""Key/value heads fewer than devices: groups of devices share a head."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from flax_mha import MultiHeadAttention, QKNorm, dot_product_attention, masks, scores, sharding
from flax_mha.positions import Rotary
from flax_mha.variants import (
    ChosenBlocksAttention,
    DifferentialAttention,
    ForgettingAttention,
    MultiHeadLatentAttention,
    TalkingHeadsAttention,
)
from tests.support.meshes import (
    BACKWARD,
    GROUPED,
    KEY,
    KINDS,
    RNG,
    B,
    H,
    X,
    compare,
    on,
)

# Query heads, key/value heads, and the mesh. Groups of query heads are whole on a device, cut by
# devices, or both.
HEADS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "one each": (8, 8, (1, 4, 2)),
    "one of four": (8, 4, (1, 4, 2)),
    "one of two": (16, 2, (1, 2, 4)),
    "two of four": (24, 4, (1, 2, 4)),
    "cut groups": (12, 4, (2, 2, 2)),
    "shared by all": (8, 1, (1, 4, 2)),
}


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", ["reference", "blockwise"])
@pytest.mark.parametrize("name", HEADS)
def test_shared_heads_match_one_device(name: str, kernel: str, kind: str) -> None:
    """Values and gradients, with every array that heads index."""
    N, K, shape = HEADS[name]
    T = 24
    q, k, v = (jnp.asarray(RNG.normal(size=(B, T, n, H)), jnp.float32) for n in (N, K, K))
    bias, sinks = jnp.asarray(RNG.normal(size=(N, T, T)), jnp.float32), jnp.arange(float(N))

    def attend(*args: jax.Array) -> Any:
        q, k, v, bias, sinks = args
        return dot_product_attention(
            q, k, v, kernel=kernel, bias=bias, sinks=sinks, return_residuals=True, dropout_rate=0.2,
            dropout_rng=KEY, scores=(scores.Alibi(),),
            mask=masks.Causal() & masks.PerHead([masks.Window(3 * n + 1) for n in range(N)]),
        )  # fmt: skip

    compare(attend, (q, k, v, bias, sinks), kind, GROUPED, [P()] * 5, shape)


LAYERS: dict[str, MultiHeadAttention] = {
    "grouped": MultiHeadAttention(
        8, num_kv_heads=4, rotary=Rotary(), qk_norm=QKNorm("rmsnorm"), gate="head", sinks=True,
        mask=masks.Causal(),
    ),
    "two": MultiHeadAttention(8, num_kv_heads=2, use_bias=True, scale="learned"),
    "one": MultiHeadAttention(8, num_kv_heads=1, rotary=Rotary()),
    "latent": MultiHeadLatentAttention(
        8, head_dim=4, kv_rank=6, rope_dim=4, rotary=Rotary(), q_rank=5
    ),
    "differential": DifferentialAttention(8, num_kv_heads=4, head_dim=4),
    "differential, two": DifferentialAttention(8, num_kv_heads=2, head_dim=4),
    "forgetting": ForgettingAttention(8, num_kv_heads=4),
    "talking": TalkingHeadsAttention(8, num_kv_heads=4),
    "chosen blocks": ChosenBlocksAttention(8, num_kv_heads=4, block=4, count=2),
    "chosen blocks, shared": ChosenBlocksAttention(8, num_kv_heads=2, block=4, count=2, share=True),
}  # fmt: skip


def randomized(params: Any) -> Any:
    """Return parameters without zeros and ones, which would hide a wrong head."""
    rng = np.random.default_rng(4)
    return jax.tree.map(lambda x: x + jnp.asarray(rng.normal(size=x.shape) / 4, x.dtype), params)


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_shared_heads_match_one_device(name: str, kind: str) -> None:
    layer = LAYERS[name]
    params = randomized(layer.init(KEY, X))

    def loss(params: Any, x: jax.Array) -> Any:
        out = layer.apply(params, x)
        return jnp.sum(jnp.sin(3 * out)), out

    gradient = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    expected = gradient(params, X)
    _, leave = on(kind, GROUPED, (1, 4, 2))
    try:
        placed = jax.device_put(params, sharding.of(layer.init, KEY, X))
        actual = jax.device_get(gradient(placed, X))
    finally:
        leave()
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        # Gradients of the keys' biases are 0, but for rounding.
        assert np.abs(a - b).max() < BACKWARD * max(10, np.abs(b).max())


def decoded(layer: Any, variables: Any, x: jax.Array, lengths: Any = None) -> Any:
    """Return the outputs of a prompt of 6 tokens and of single tokens, and the cache."""
    step = jax.jit(lambda v, x, n: layer.apply(v, x, lengths=n, mutable=["cache"]))
    outs = []
    for first, last in ((0, 6), (6, 7), (7, 8), (8, 16)):
        out, new = step(variables, x[:, first:last], lengths if first == 0 else None)
        variables = variables | new
        outs.append(out)
    return jax.device_get(outs), variables["cache"]


@pytest.mark.sampled(0.15)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
def test_decoding_with_shared_heads_matches_one_device(name: str, kind: str) -> None:
    layer = LAYERS[name].clone(decode=True)
    lengths = jnp.array([6, 3, 0, 5])
    variables = layer.init(KEY, X)
    variables |= {"params": randomized(variables["params"])}
    expected, _ = decoded(layer, variables, X, lengths)
    _, leave = on(kind, GROUPED, (1, 4, 2))
    try:
        placed = jax.device_put(variables, sharding.of(layer.init, KEY, X))
        actual, cache = decoded(layer, placed, X, lengths)
    finally:
        leave()
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    key = cache["kv"].key
    # Of K heads each device has one, or as few as 4 devices can share out.
    assert key.addressable_shards[0].data.shape[1] == -(-key.shape[1] // 8) or key.shape[1] == 2
