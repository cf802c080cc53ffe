"""A cache with slots over a mesh axis: each device attends to its own, and all merge by lse."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from experiments.plan.collectives import Collective, read
from flax_mha import CacheConfig, Capture, MultiHeadAttention, cache, masks, scores, sharding
from flax_mha.positions import Rotary
from flax_mha.variants import ChosenBlocksAttention, DifferentialAttention, TalkingHeadsAttention
from tests.kernels.cases import pairs
from tests.sharding.test_grouped_heads import LAYERS as SHARED
from tests.support.arrays import zeros
from tests.support.decoding import cache_of
from tests.support.meshes import GROUPED, KEY, KINDS, RNG, B, H, X, changed, described, on
from tests.support.oracle import random_like

# Meshes (data, model, group), and the rules of caches on them: slots over an axis of their own,
# over the devices that share a head, over those of all heads; and heads in groups alone.
RULES: dict[str, tuple[tuple[tuple[str, Any], ...], tuple[int, ...]]] = {
    "own axis": (changed(cache_length="group"), (2, 2, 2)),
    "axis of groups": (
        changed(heads=("model", "group"), kv_heads="model", cache_length="group"), (1, 4, 2),
    ),
    "axis of heads": (changed(kv_heads=None, cache_length="model"), (2, 4, 1)),
    "whole": (GROUPED, (1, 4, 2)),
}  # fmt: skip
LAYERS = SHARED | {
    "int8": MultiHeadAttention(
        8, num_kv_heads=4, cache=CacheConfig("int8"), sinks=True, rotary=Rotary()
    ),
    "window": MultiHeadAttention(8, num_kv_heads=4, mask=masks.Window(5, 0), sinks=True),
    "ring buffer": MultiHeadAttention(
        8, num_kv_heads=4, mask=masks.Window(5, 0), sinks=True, cache=CacheConfig(slots=7)
    ),
    "scores": MultiHeadAttention(
        8, num_kv_heads=4, scores=(scores.Alibi(), scores.SoftCap(3.0)),
        capture=Capture(("entropy", "weights")),
    ),
}  # fmt: skip


def decode(layer: Any, variables: Any, x: jax.Array, pieces: tuple[int, ...], lengths: Any) -> Any:
    """Return the outputs of pieces of x, the first of them with `lengths`, and the cache."""
    step = jax.jit(lambda v, x, n: layer.apply(v, x, lengths=n, mutable=["cache", "intermediates"]))
    outs, first = [], 0
    for size in pieces:
        piece = x[:, first : first + size]
        out, new = step(variables, piece, None if first else lengths)
        variables, first = variables | {"cache": new["cache"]}, first + size
        outs.append((out, new.get("intermediates")))
    return jax.device_get(outs), variables["cache"]


# The calls: a prompt, tokens, and tokens that fill the slots; or a prompt that is longer than a
# shard, one that goes on, a token, and tokens beyond the last slot.
CALLS = {"short": (6, 1, 1, 8), "long": (70, 66, 1, 23)}
SHARDS = {"own axis": 2, "axis of groups": 2, "axis of heads": 4, "whole": 1}


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("name", "rules", "kind", "calls"),
    [
        *((*case, "short") for case in pairs(name=[*LAYERS], rules=[*RULES], kind=[*KINDS])),
        ("grouped", "own axis", "Auto", "long"), ("latent", "own axis", "Explicit", "long"),
        ("int8", "own axis", "Explicit", "long"),
    ],
)  # fmt: skip
def test_sharded_slots_match_one_device(name: str, rules: str, kind: str, calls: str) -> None:
    """Rows of different lengths are decoded to full slots."""
    layer, pieces = LAYERS[name].clone(decode=True), CALLS[calls]
    x = np.random.default_rng(5).normal(size=(B, sum(pieces), X.shape[-1])).astype(np.float32)
    lengths = (pieces[0] * np.array([1, 0.5, 0, 0.8])).astype(np.int32)
    params = random_like(jax.eval_shape(layer.init, KEY, x)["params"])
    variables = {"params": params, "cache": cache_of(layer, x)}
    args = x, pieces, lengths
    expected, _ = decode(layer, variables, *args)
    with on(kind, *RULES[rules]):
        placed = jax.device_put(variables, sharding.of(layer.init, KEY, x))
        actual, held = decode(layer, placed, *args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), actual, expected)
    slots = 7 if name == "ring buffer" else sum(pieces) // SHARDS[rules]
    assert held["kv"].key.addressable_shards[0].data.shape[-2] == slots


def test_sinks_over_sharded_slots_count_once() -> None:
    test_sharded_slots_match_one_device("window", "own axis", "Auto", "short")


def sent_by_a_step(layer: nn.Module, slots: int) -> list[Collective]:
    """Return the collectives of a step of decoding on this mesh."""
    variables = described(layer, zeros((B, slots, X.shape[-1])))
    step = jax.jit(lambda v, x: layer.apply(v, x, mutable=["cache"]))
    return list(read(step.lower(variables, X[:, :1]).compile().as_text(), devices=8))


@pytest.mark.sampled(0.06)
@pytest.mark.parametrize("name", ["grouped", "one", "latent"])
def test_step_sends_the_merged_output_alone(optimized, name: str) -> None:
    """The maximum, the sum, and the output of each query; nothing of the cache."""
    layer, sent = LAYERS[name].clone(decode=True), []
    # Latents have a 1 for the bias of the values.
    N, width = 8, {"latent": 7}.get(name, H)
    for slots in (16, 64):
        with on("Auto", *RULES["own axis"]):
            found = sent_by_a_step(layer, slots)
            key = described(layer, zeros((B, slots, X.shape[-1])))["cache"]["kv"].key
        heads = 2 if name == "grouped" else 1
        # Two of four devices' rows and slots, and of two devices' heads.
        assert key.sharding.shard_shape(key.shape) == (B // 2, heads, slots // 2, key.shape[-1])
        sent.append(found)
    merged = [one for one in sent[0] if (one.groups[0] == [0, 1]).all()]
    rest = [one.bytes for one in sent[0] if not (one.groups[0] == [0, 1]).all()]
    assert {one.kind for one in sent[0]} == {"all-reduce"}
    assert sum(one.bytes for one in merged) == 4 * (B // 2) * (N // 2) * (width + 2)
    # The output projection sums over heads, as ever.
    assert rest == [4 * (B // 2) * X.shape[-1]]
    assert [one.bytes for one in sent[0]] == [one.bytes for one in sent[1]]


@pytest.mark.sampled(0.03)
@pytest.mark.parametrize(
    "layer",
    [
        DifferentialAttention(8, num_kv_heads=4, head_dim=4, decode=True),
        ChosenBlocksAttention(8, block=4, count=2, decode=True),
        TalkingHeadsAttention(8, num_kv_heads=4, decode=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_steps_send_bytes_independent_of_cache_size(optimized: None, layer: nn.Module) -> None:
    with on("Auto", shape=(1, 8)):
        few, many = ([one.bytes for one in sent_by_a_step(layer, slots)] for slots in (16, 64))
    assert few == many


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_operations_on_sharded_slots_match_one_device(kind: str) -> None:
    """A cache as a value: overflow, truncate, fork, arrays over the slots, gradients."""
    q, k, v = (RNG.normal(size=(4, 10, n, 8)).astype(np.float32) for n in (4, 2, 2))
    bias, seen = RNG.normal(size=(4, 3, 16)).astype(np.float32), RNG.uniform(size=(3, 16)) < 0.7

    def run(held: cache.KVCache) -> Any:
        out, held = held.extend(q, k, v, lengths=jnp.array([10, 4, 0, 7]))
        held = cache.truncate([held], jnp.array([8, 4, 0, 2]))[0].fork(jnp.array([0, 0, 1, 3]))

        def attend(q: jax.Array, bias: jax.Array, k: jax.Array) -> Any:
            out, new = held.extend(q, k, v[:, :3], bias=bias, mask=seen, sinks=jnp.arange(4.0))
            return jnp.sum(jnp.sin(out)), (out, new)

        args = q[:, :3], bias, k[:, :3]
        gradients, (some, held) = jax.grad(attend, (0, 1, 2), has_aux=True)(*args)
        full, held = held.extend(q, k, v)
        return out, some, gradients, full, held.overflowed, held.reset().free()

    empty = cache.KVCache.empty((4,), 16, 2, 8)
    expected = jax.jit(run)(empty)
    assert jnp.isnan(expected[3]).any()
    with on(kind, *RULES["own axis"]) as mesh:
        placed = jax.device_put(empty, NamedSharding(mesh, PartitionSpec()))
        actual = jax.device_get(jax.jit(run)(placed))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), actual, expected)
