"""A cache with slots over a mesh axis: each device attends to its own, and all merge by lse."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from experiments.plan.collectives import read
from flax_mha import CacheConfig, Capture, MultiHeadAttention, cache, masks, scores, sharding
from flax_mha.positions import Rotary
from tests.kernels.cases import pairs
from tests.sharding.test_grouped_heads import LAYERS as SHARED
from tests.sharding.test_grouped_heads import randomized
from tests.support.arrays import zeros
from tests.support.meshes import GROUPED, KEY, KINDS, RNG, B, H, X, changed, described, on

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


@functools.cache
def on_one_device(name: str, pieces: tuple[int, ...]) -> Any:
    """Return a layer, its variables, the arguments of `decode`, and its result on one device."""
    layer, rows = LAYERS[name].clone(decode=True), np.random.default_rng(5)
    x = jnp.asarray(rows.normal(size=(B, sum(pieces), X.shape[-1])), jnp.float32)
    lengths = (pieces[0] * jnp.array([1.0, 0.5, 0, 0.8])).astype(jnp.int32)
    variables = layer.init(KEY, x)
    variables |= {"params": randomized(variables["params"])}
    args = x, pieces, lengths
    return layer, variables, args, decode(layer, variables, *args)[0]


def check(name: str, rules: str, kind: str, pieces: tuple[int, ...]) -> Any:
    """Decode on a mesh as on one device, from rows of different lengths to full slots."""
    layer, variables, args, expected = on_one_device(name, pieces)
    _, leave = on(kind, *RULES[rules])
    try:
        placed = jax.device_put(variables, sharding.of(layer.init, KEY, args[0]))
        actual, held = decode(layer, placed, *args)
    finally:
        leave()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), actual, expected)
    return held["kv"].key


@pytest.mark.sampled(0, slow=0.16)
@pytest.mark.parametrize(
    ("name", "rules", "kind"), pairs(name=[*LAYERS], rules=[*RULES], kind=[*KINDS])
)
def test_sharded_slots_match_one_device(name: str, rules: str, kind: str) -> None:
    key = check(name, rules, kind, (6, 1, 1, 8))
    slots = {"own axis": 8, "axis of groups": 8, "axis of heads": 4, "whole": 16}[rules]
    slots = 7 if name == "ring buffer" else slots
    assert key.addressable_shards[0].data.shape[-2] == slots


@pytest.mark.sampled(0, slow=0.3)
@pytest.mark.parametrize(
    ("name", "kind"), [("grouped", "Auto"), ("latent", "Explicit"), ("int8", "Explicit")]
)
def test_prompt_longer_than_a_shard_matches_one_device(name: str, kind: str) -> None:
    """A first prompt, one that goes on, tokens, and tokens beyond the last slot."""
    check(name, "own axis", kind, (70, 66, 1, 23))


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("name", ["grouped", "one", "latent"])
def test_step_sends_the_merged_output_alone(optimized, name: str) -> None:
    """The maximum, the sum, and the output of each query; nothing of the cache."""
    layer, sent = LAYERS[name].clone(decode=True), []
    # Latents have a 1 for the bias of the values.
    N, width = 8, {"latent": 7}.get(name, H)
    for slots in (16, 64):
        _, leave = on("Auto", *RULES["own axis"])
        try:
            variables = described(layer, zeros((B, slots, X.shape[-1])))
            step = jax.jit(lambda v, x: layer.apply(v, x, mutable=["cache"]))
            text = step.lower(variables, X[:, :1]).compile().as_text()
            key = variables["cache"]["kv"].key
        finally:
            leave()
        heads = 2 if name == "grouped" else 1
        # Two of four devices' rows and slots, and of two devices' heads.
        assert key.sharding.shard_shape(key.shape) == (B // 2, heads, slots // 2, key.shape[-1])
        sent.append(read(text, devices=8))
    merged = [one for one in sent[0] if (one.groups[0] == [0, 1]).all()]
    rest = [one.bytes for one in sent[0] if not (one.groups[0] == [0, 1]).all()]
    assert {one.kind for one in sent[0]} == {"all-reduce"}
    assert sum(one.bytes for one in merged) == 4 * (B // 2) * (N // 2) * (width + 2)
    # The output projection sums over heads, as ever.
    assert rest == [4 * (B // 2) * X.shape[-1]]
    assert [one.bytes for one in sent[0]] == [one.bytes for one in sent[1]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_operations_on_sharded_slots_match_one_device(kind: str) -> None:
    """A cache as a value: overflow, truncate, fork, arrays over the slots, gradients."""
    q, k, v = (jnp.asarray(RNG.normal(size=(4, 10, n, 8)), jnp.float32) for n in (4, 2, 2))
    bias = jnp.asarray(RNG.normal(size=(4, 3, 16)), jnp.float32)
    seen = jnp.asarray(RNG.uniform(size=(3, 16)) < 0.7)

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
    mesh, leave = on(kind, *RULES["own axis"])
    try:
        placed = jax.device_put(empty, NamedSharding(mesh, PartitionSpec()))
        actual = jax.device_get(jax.jit(run)(placed))
    finally:
        leave()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), actual, expected)


def test_slots_that_cannot_be_sharded_are_refused() -> None:
    q = jnp.ones((4, 1, 4, 8))
    held = cache.KVCache.empty((4,), 15, 4, 8)
    _, leave = on("Auto", *RULES["own axis"])
    try:
        with pytest.raises(ValueError, match=r"'cache_length' counts 15, which does not divide"):
            jax.eval_shape(held.extend, q, q, q)
        held = cache.KVCache.empty((4,), 16, 4, 8)
        with pytest.raises(ValueError, match=r"must be 'softmax' to merge the slots of several"):
            jax.eval_shape(functools.partial(held.extend, normalizer="sigmoid"), q, q, q)
    finally:
        leave()
