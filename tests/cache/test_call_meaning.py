"""The meaning of a call: its arguments and the cache say it, never the identity of arrays."""

import functools
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_mha
from flax_mha import Decoder, DecoderBlock, MultiHeadAttention, cache, masks, scores
from flax_mha.cache import Encoded
from flax_mha.positions import Rotary
from tests.support.oracle import random_like

KEY = jax.random.key(0)
X, MEMORY = (
    np.random.default_rng(n).normal(size=(2, T, 16)).astype(np.float32) for n, T in ((0, 6), (1, 7))
)
LENGTHS = np.array([6, 3])
# Wrappers under which both arguments of layer(x, x) are other objects than outside.
LAYERS: dict[str, Any] = {
    "plain": MultiHeadAttention, "remat": nn.remat(MultiHeadAttention),
    "jit": nn.jit(MultiHeadAttention),
}  # fmt: skip
POSITIONAL: dict[str, dict[str, Any]] = {
    "rotary": {"rotary": Rotary()}, "alibi": {"scores": (scores.Alibi(),)},
    "bias": {"scores": (scores.RelativeBias(buckets=8),)}, "window": {"mask": masks.Window(2, 2)},
    "causal": {"mask": masks.Causal()}, "nothing": {},
}  # fmt: skip


def close(got: Any, wanted: Any) -> None:
    np.testing.assert_allclose(got, wanted, atol=3e-6, rtol=0)


def variables(layer: nn.Module, *inputs: Any, **call: Any) -> Any:
    """Return random parameters of a layer, without a cache."""
    shapes = jax.eval_shape(lambda: layer.init(KEY, *inputs, **call))
    return {"params": random_like(shapes["params"])}


def run(layer: nn.Module, v: Any, *inputs: Any, **call: Any) -> tuple[jax.Array, Any]:
    out, new = layer.apply(v, *inputs, **call, mutable="cache")
    return out, {**v, **new}


@pytest.mark.sampled(0.13, slow=0.2)
def test_lengths_and_positions_are_of_the_queries_whichever_arrays_come() -> None:
    layer = MultiHeadAttention(2, rotary=Rotary())
    v = variables(layer, X)
    call = functools.partial(layer.apply, v, lengths=LENGTHS, positions=np.arange(6) + 3)
    same, other = call(X, X), call(X, X.copy())
    np.testing.assert_array_equal(same, other)
    close(jax.jit(call)(X, X), same)
    # Keys of another sequence are all there, at 0 … S−1.
    apart = (np.arange(6) + 3, np.arange(6))
    wanted = layer.apply(v, X, X, positions=apart, mask=masks.Lengths([6, 6], LENGTHS))
    close(same, wanted)
    own = layer.apply(v, X, lengths=LENGTHS, positions=np.arange(6) + 3)
    assert abs(own - same).max() > 0.1


def test_the_number_of_keys_does_not_decide_where_they_are() -> None:
    layer = MultiHeadAttention(2, rotary=Rotary())
    v = variables(layer, X)
    call = functools.partial(layer.apply, v, X, positions=np.arange(6) + 10)
    close(call(MEMORY[:, :6]), call(MEMORY, mask=masks.Keys(np.arange(7) < 6)))


@pytest.mark.sampled(0.25, slow=0.2)
@pytest.mark.parametrize("name", LAYERS)
def test_decoding_appends_inputs_k(name: str) -> None:
    layer = LAYERS[name](2, decode=True, rotary=Rotary())
    plain = MultiHeadAttention(2, rotary=Rotary(), mask=masks.Causal())
    v = variables(plain, X)
    wanted = plain.apply(v, X)
    held = {**v, "cache": layer.init(KEY, X, X)["cache"]}
    assert [*held["cache"]] == ["kv"]
    bad = X.copy()
    bad[1, 3:] = np.nan
    out, ragged = run(layer, held, bad, bad.copy(), lengths=LENGTHS)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(ragged["cache"]["kv"].length, LENGTHS)
    for t in range(6):
        token = X[:, t : t + 1]
        out, held = run(layer, held, token, 1 * token)
        close(out[:, 0], wanted[:, t])


@pytest.mark.sampled(0.13, slow=0.2)
@pytest.mark.parametrize("name", POSITIONAL)
def test_queries_to_kept_keys_continue(name: str) -> None:
    layer = MultiHeadAttention(2, **POSITIONAL[name])
    v = variables(layer, X, MEMORY)
    wanted = layer.apply(v, X, MEMORY)
    cached = layer.clone(decode=True)
    # `init` only makes room, and every other call counts.
    assert not cached.init(KEY, X, kv=Encoded(MEMORY))["cache"]["memory"].queries.any()
    call = jax.jit(functools.partial(run, cached, kv=Encoded(MEMORY)))
    out, counted = call(v, X[:, :3], lengths=np.array([3, 1]))
    close(out[0], wanted[0, :3])
    close(out[1, :1], wanted[1, :1])
    following = np.stack([X[0, 3:5], X[1, 1:3]])
    out, _ = run(cached, counted, following, lengths=np.array([1, 2]))
    close(out[0, :1], wanted[0, 3:4])
    close(out[1], wanted[1, 1:3])
    # Keys that are given again replace the others, and queries continue.
    out, _ = run(cached, counted, following, kv=Encoded(MEMORY))
    close(out[0], wanted[0, 3:5])
    kept = cache.truncate(counted["cache"], 2)["memory"]
    np.testing.assert_array_equal(kept.queries, [2, 1])
    np.testing.assert_array_equal(cache.reset(counted["cache"])["memory"].queries, 0)


@pytest.mark.sampled(0.13, slow=0.2)
def test_kept_keys_under_vmap_match_a_loop() -> None:
    """Each of three has its own memory. The captured weights and gradients are those of a loop."""
    layer = MultiHeadAttention(2, decode=True, capture=flax_mha.Capture(("weights",)))
    v = {"params": variables(layer.clone(decode=False), X, MEMORY)["params"]}
    memories = jnp.stack([MEMORY, 2 * MEMORY, MEMORY[::-1]])

    def loss(memory: jax.Array) -> Any:
        names = ["cache", "intermediates"]
        _, held = layer.apply(v, X[:, :2], kv=Encoded(memory), mutable=names)
        state = {**v, "cache": held["cache"]}
        out, new = layer.apply(state, X[:, 2:3], kv=Encoded(), mutable=names)
        (weights,) = new["intermediates"]["attention_weights"]
        return jnp.sin(out).sum() + jnp.sin(3 * weights).sum(), (out, weights)

    each = jax.jit(jax.grad(loss, has_aux=True))
    wanted = jax.tree.map(lambda *x: jnp.stack(x), *map(each, memories))
    for got, want in zip(*map(jax.tree.leaves, (jax.vmap(each)(memories), wanted)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(0.13, slow=0.2)
@pytest.mark.parametrize("name", POSITIONAL)
def test_nnx_queries_to_kept_keys_continue(name: str) -> None:
    layer = flax_mha.nnx.MultiHeadAttention(2, 16, **POSITIONAL[name], rngs=nnx.Rngs(0))
    wanted = layer(X, MEMORY)
    close(layer(X[:, :3], kv=Encoded(MEMORY), decode=True), wanted[:, :3])
    close(layer(X[:, 3:4], decode=True), wanted[:, 3:4])
    close(layer(X[:, 4:], kv=Encoded(), decode=True), wanted[:, 4:])


@pytest.mark.sampled(0.13, slow=0.2)
@pytest.mark.parametrize("scan", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_decoder_keeps_its_memory_and_continues(scan: bool) -> None:
    def model(decode: bool) -> Decoder:
        layer, cross = (
            MultiHeadAttention(2, decode=decode, rotary=Rotary(), scores=some)
            for some in ((), (scores.Alibi(),))
        )
        return Decoder(2, DecoderBlock(layer, 8, cross_attention=cross), scan=scan)

    plain, cached = model(False), model(True)
    v = variables(plain, X, MEMORY)
    wanted = plain.apply(v, X, MEMORY)
    _, held = run(cached, v, X, MEMORY)
    step = jax.jit(functools.partial(run, cached))
    for t in range(4):
        out, held = step(held, X[:, t : t + 1])
        close(out[:, 0], wanted[:, t])
    back = cache.truncate(held["cache"], 2)
    close(step({**v, "cache": back}, X[:, 2:3])[0][:, 0], wanted[:, 2])
    # A memory that is made while self-attention counts is counted as well.
    own = {n: {"attention": x["attention"]} for n, x in cache.reset(held["cache"]).items()}
    out, held = run(cached, {**v, "cache": own}, X[:, :2], MEMORY)
    close(out, wanted[:, :2])
    close(step(held, X[:, 2:3])[0][:, 0], wanted[:, 2])


def test_encoded_inputs_are_inputs_k_without_decoding() -> None:
    layer = MultiHeadAttention(2)
    v = variables(layer, X, MEMORY)
    for inputs in ((MEMORY,), (MEMORY, 2 * MEMORY)):
        encoded = layer.apply(v, X, kv=Encoded(*inputs))
        np.testing.assert_array_equal(encoded, layer.apply(v, X, *inputs))


def test_a_cache_says_which_calls_it_takes() -> None:
    layer = MultiHeadAttention(2, decode=True)
    tokens, encoded = layer.init(KEY, X), layer.init(KEY, X, kv=Encoded(MEMORY))
    with pytest.raises(ValueError, match=r"holds an encoder's keys .*, got inputs_k; give kv="):
        run(layer, encoded, X[:, :1], X[:, :1])
    with pytest.raises(ValueError, match=r"holds the tokens of earlier calls, got kv=Encoded"):
        run(layer, tokens, X[:, :1], kv=Encoded(MEMORY))
    with pytest.raises(flax.errors.ModifyScopeVariableError, match='"memory" in "/" because colle'):
        layer.apply(encoded, X[:, :1])


JUNK: dict[str, Any] = {
    "none": {"kv": None}, "flax": {"cached_key": X, "cached_value": X, "cache_index": 0},
    "two": {"kv": None, "memory": None}, "array": {"kv": X}, "name": {"keys": X},
}  # fmt: skip


@pytest.mark.parametrize("name", JUNK)
def test_a_cache_of_another_kind_is_an_error(name: str) -> None:
    layer = MultiHeadAttention(2, decode=True)
    v = variables(MultiHeadAttention(2), X)
    with pytest.raises(TypeError, match=r"a layer's c.*must (be|have)"):
        run(layer, {**v, "cache": JUNK[name]}, X[:, :1])
