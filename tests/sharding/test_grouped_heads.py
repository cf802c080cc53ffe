"""Key/value heads fewer than devices: groups of devices share a head."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from experiments.plan.collectives import read
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
    collectives,
    compare,
    described,
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


@pytest.mark.sampled(0.05)
@pytest.mark.parametrize(
    ("name", "kernel", "kind"),
    pairs(name=[*HEADS], kernel=["reference", "blockwise"], kind=[*KINDS]),
)
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


def test_devices_take_the_heads_that_their_queries_read() -> None:
    """A device holds two key/value heads, and its query heads read one."""
    q, k, v = (jnp.asarray(RNG.normal(size=(B, 8, n, H)), jnp.float32) for n in (24, 4, 4))
    compare(dot_product_attention, (q, k, v), "Auto", GROUPED, [P()] * 3, (1, 2, 4))


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


def randomized(params: Any) -> Any:
    """Return parameters without zeros and ones, which would hide a wrong head."""
    rng = np.random.default_rng(4)
    return jax.tree.map(lambda x: x + jnp.asarray(rng.normal(size=x.shape) / 4, x.dtype), params)


@functools.cache
def on_one_device(name: str) -> Any:
    """Return a layer, its arguments, a gradient with outputs, and its result, all in float64."""
    layer = LAYERS[name].clone(dtype=jnp.float64, param_dtype=jnp.float64)
    x = jnp.asarray(X, jnp.float64)
    params = randomized(layer.init(KEY, x))

    def loss(params: Any, x: jax.Array) -> Any:
        out = layer.apply(params, x)
        return jnp.sum(jnp.sin(3 * out)), out

    gradient = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    return layer, (params, x), gradient, gradient(params, x)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_shared_heads_match_one_device(name: str, kind: str) -> None:
    """In float64: some gradients are sums whose terms cancel but for their rounding."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        layer, (params, x), gradient, expected = on_one_device(name)
        _, leave = on(kind, GROUPED, (1, 4, 2))
        try:
            placed = jax.device_put(params, sharding.of(layer.init, KEY, x))
            actual = jax.device_get(gradient(placed, x))
        finally:
            leave()
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.sampled(0.06)
@pytest.mark.parametrize("name", LAYERS)
def test_inputs_may_be_numpy_arrays_on_explicit_axes(name: str) -> None:
    layer, x = LAYERS[name], np.asarray(X)
    params = randomized(layer.init(KEY, x))
    expected = layer.apply(params, x)
    _, leave = on("Explicit", GROUPED, (1, 4, 2))
    try:
        placed = jax.device_put(params, sharding.of(lambda key: layer.init(key, x), KEY))
        actual = jax.device_get(jax.jit(lambda params: layer.apply(params, x))(placed))
    finally:
        leave()
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("K", "shape"), [(4, (1, 4, 2)), (2, (1, 2, 4))])
def test_gradients_of_shared_heads_are_summed_over_their_group(
    optimized, K: int, shape: tuple[int, ...], kind: str
) -> None:
    """Beside B·T·D each way, it sends the sums of keys, values and kernels in groups.

    On CPUs queries, keys and values have a sum of their own on the way back.
    """
    layer = MultiHeadAttention(8, num_kv_heads=K, kernel="blockwise", mask=masks.Causal())

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(layer.apply(params, x)))

    _, leave = on(kind, GROUPED, shape)
    try:
        params = described(layer, X)
        forward = jax.jit(layer.apply).lower(params, X).compile().as_text()
        both = jax.jit(jax.grad(loss, (0, 1))).lower(params, X).compile().as_text()
    finally:
        leave()
    BTD, D, T = 4 * X.size, X.shape[-1], X.shape[1]
    assert collectives(forward) == [("all-reduce", BTD)]
    found = read(both, devices=8)
    assert {one.kind for one in found} == {"all-reduce"}
    everywhere = [one.bytes for one in found if one.groups.shape == (1, 8)]
    assert sum(everywhere) == 4 * BTD
    # Each device has one key/value head.
    of_group = [one.bytes for one in found if one.groups.shape == (K, 8 // K)]
    assert sum(of_group) == 4 * 2 * H * (B * T + D)
    assert len(everywhere) + len(of_group) == len(found)


def test_devices_hold_only_the_heads_of_their_group() -> None:
    """K of 8 devices' heads would need K/8 of the cache; here that is one head each."""
    layer = MultiHeadAttention(8, num_kv_heads=4, decode=True)
    for rules in (GROUPED, changed(heads=("model", "group"))):
        _, leave = on("Auto", rules, (1, 4, 2))
        try:
            shapes = described(layer, X)
        finally:
            leave()
        for x in (shapes["cache"]["kv"].key, shapes["params"]["key"]["kernel"]):
            part = x.sharding.shard_shape(x.shape)
            assert np.prod(x.shape) == 4 * np.prod(part)


def test_key_value_heads_over_other_axes_are_refused() -> None:
    q, k = jnp.ones((2, 4, 8, 4)), jnp.ones((2, 4, 4, 4))
    rules = changed(heads=("model", "group"), kv_heads="group")
    _, leave = on("Auto", rules, (1, 2, 4))
    try:
        with pytest.raises(
            ValueError,
            match=r"over \('model', 'group'\) and key/value heads over "
            r"'group'; give both the same rule, or key/value heads the first axes",
        ):
            dot_product_attention(q, k, k)
    finally:
        leave()
