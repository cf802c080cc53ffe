"""Key/value heads fewer than devices: groups of devices share a head."""

from typing import Any

import jax
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
from tests.kernels.cases import pairs
from tests.support.meshes import (
    GROUPED,
    KEY,
    KINDS,
    RNG,
    B,
    H,
    X,
    changed,
    compare,
    described,
    on,
)
from tests.support.oracle import random_like

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


@pytest.mark.sampled(0.03)
@pytest.mark.parametrize(
    ("name", "kernel", "kind"),
    pairs(name=[*HEADS], kernel=["reference", "blockwise"], kind=[*KINDS]),
)
def test_shared_heads_match_one_device(name: str, kernel: str, kind: str) -> None:
    """Values and gradients, with every array that heads index."""
    N, K, shape = HEADS[name]
    T = 24
    q, k, v = (RNG.normal(size=(B, T, n, H)).astype(np.float32) for n in (N, K, K))
    bias, sinks = RNG.normal(size=(N, T, T)).astype(np.float32), np.arange(N, dtype=np.float32)

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
    "chosen blocks, two": ChosenBlocksAttention(8, num_kv_heads=2, block=4, count=2),
}  # fmt: skip


@pytest.mark.sampled(0.18)
@pytest.mark.parametrize("name", ["grouped", "latent"])
def test_inputs_may_be_numpy_arrays_on_explicit_axes(name: str) -> None:
    layer, x = LAYERS[name], np.asarray(X)
    params = random_like(jax.eval_shape(layer.init, KEY, x))
    expected = jax.jit(layer.apply)(params, x)
    with on("Explicit", GROUPED, (1, 4, 2)):
        placed = jax.device_put(params, sharding.of(lambda key: layer.init(key, x), KEY))
        actual = jax.device_get(jax.jit(lambda params: layer.apply(params, x))(placed))
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_devices_hold_only_the_heads_of_their_group() -> None:
    """K of 8 devices' heads would need K/8 of the cache; here that is one head each."""
    layer = MultiHeadAttention(8, num_kv_heads=4, decode=True)
    for rules in (GROUPED, changed(heads=("model", "group"))):
        with on("Auto", rules, (1, 4, 2)):
            shapes = described(layer, X)
        for x in (shapes["cache"]["kv"].key, shapes["params"]["key"]["kernel"]):
            part = x.sharding.shard_shape(x.shape)
            assert np.prod(x.shape) == 4 * np.prod(part)
