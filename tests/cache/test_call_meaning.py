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
from flax_mha import CacheConfig, Decoder, DecoderBlock, MultiHeadAttention, cache, masks, scores
from flax_mha.cache import Encoded
from flax_mha.positions import Rotary
from tests.support.decoding import cache_of
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
    "float16": {"num_kv_heads": 1, "cache": CacheConfig("float16")},
}  # fmt: skip


def close(got: Any, wanted: Any, atol: float = 3e-6) -> None:
    np.testing.assert_allclose(got, wanted, atol=atol, rtol=0)


def variables(layer: nn.Module, *inputs: Any, **call: Any) -> Any:
    """Return random parameters of a layer, and its empty cache if it decodes."""
    shapes = jax.eval_shape(lambda: layer.init(KEY, *inputs, **call))
    empty = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    return {**empty, "params": random_like(shapes["params"])}


@functools.partial(jax.jit, static_argnums=0)
def run(layer: nn.Module, v: Any, *inputs: Any, **call: Any) -> tuple[jax.Array, Any]:
    out, new = layer.apply(v, *inputs, **call, mutable="cache")
    return out, {**v, **new}


@pytest.mark.sampled(0.08)
def test_arguments_say_where_queries_and_keys_are() -> None:
    """Neither the identity of the arrays nor the number of keys matters."""
    layer = MultiHeadAttention(2, rotary=Rotary())
    v, at = variables(layer, X), np.arange(6)

    @jax.jit
    def calls(x: jax.Array, other: jax.Array, memory: jax.Array) -> Any:
        call = functools.partial(layer.apply, v, x)
        own = {"lengths": LENGTHS, "positions": at + 3}
        # Keys of another sequence are all there, at 0 … S−1.
        apart = call(x, positions=(at + 3, at), mask=masks.Lengths([6, 6], LENGTHS))
        hidden = call(memory, positions=at + 10, mask=masks.Keys(np.arange(7) < 6))
        pairs = [(call(memory[:, :6], positions=at + 10), hidden)]
        return [(call(x, **own), apart), (call(other, **own), apart), *pairs], call(**own)

    found, alone = calls(X, X, MEMORY)
    for same, wanted in found:
        close(same, wanted)
    assert abs(alone - found[0][0]).max() > 0.1


@pytest.mark.sampled(0.15)
@pytest.mark.parametrize("name", LAYERS)
def test_decoding_appends_inputs_k(name: str) -> None:
    layer = LAYERS[name](2, decode=True, rotary=Rotary())
    plain = MultiHeadAttention(2, rotary=Rotary(), mask=masks.Causal())
    held = variables(layer, X, X)
    wanted = np.asarray(jax.jit(plain.apply)({"params": held["params"]}, X))
    assert [*held["cache"]] == ["kv"]
    bad = X.copy()
    bad[1, 3:] = np.nan
    out, ragged = run(layer, held, bad, bad.copy(), lengths=LENGTHS)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(ragged["cache"]["kv"].length, LENGTHS)
    for t in range(4):
        token = X[:, t : t + 1]
        out, held = run(layer, held, token, token.copy())
        close(out[:, 0], wanted[:, t])


@pytest.mark.sampled(0.1)
@pytest.mark.parametrize("name", POSITIONAL)
def test_queries_to_kept_keys_continue(name: str) -> None:
    layer = MultiHeadAttention(2, **POSITIONAL[name])
    v = variables(layer, X, MEMORY)
    wanted = np.asarray(jax.jit(layer.apply)(v, X, MEMORY))
    cached, atol = layer.clone(decode=True), 1e-2 if name == "float16" else 3e-6
    # `init` only makes room, and every other call counts.
    empty = cache_of(cached, X, kv=Encoded(MEMORY))
    assert [*empty] == ["memory"]
    assert not empty["memory"].queries.any()
    first = np.stack([X[0, :3], X[1, :3]])
    out, counted = run(cached, v, first, kv=Encoded(MEMORY), lengths=np.array([3, 1]))
    close(out[0], wanted[0, :3], atol)
    close(out[1, :1], wanted[1, :1], atol)
    following = np.stack([X[0, 3:6], X[1, 1:4]])
    out, _ = run(cached, counted, following, lengths=np.array([1, 2]))
    close(out[0, :1], wanted[0, 3:4], atol)
    close(out[1, :2], wanted[1, 1:3], atol)
    # Keys that are given again replace the others, and queries continue.
    out, _ = run(cached, counted, following, kv=Encoded(MEMORY), lengths=np.array([3, 3]))
    close(out[0], wanted[0, 3:6], atol)
    kept = cache.truncate(counted["cache"], 2)["memory"]
    np.testing.assert_array_equal(kept.queries, [2, 1])
    np.testing.assert_array_equal(cache.reset(counted["cache"])["memory"].queries, 0)
    forked = cache.fork(counted["cache"], np.array([1]))["memory"]
    np.testing.assert_array_equal(forked.key, counted["cache"]["memory"].key[1:])


@pytest.mark.sampled(0.08)
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


@pytest.mark.sampled(0.08)
def test_nnx_queries_to_kept_keys_continue() -> None:
    fields = POSITIONAL["rotary"] | POSITIONAL["alibi"] | POSITIONAL["window"]
    layer = flax_mha.nnx.MultiHeadAttention(2, 16, **fields, rngs=nnx.Rngs(0))

    @nnx.jit
    def calls(layer: Any, x: jax.Array, memory: jax.Array) -> Any:
        steps = [
            layer(x[:, :3], kv=Encoded(memory), decode=True), layer(x[:, 3:4], decode=True),
            layer(x[:, 4:], kv=Encoded(), decode=True),
        ]  # fmt: skip
        return layer(x, memory), jnp.concatenate(steps, 1)

    close(*calls(layer, X, MEMORY))


@pytest.mark.sampled(0.15)
@pytest.mark.parametrize("scan", [False, True])
def test_a_decoder_keeps_its_memory_and_continues(scan: bool) -> None:
    def model(decode: bool) -> Decoder:
        layer, cross = (
            MultiHeadAttention(2, decode=decode, rotary=Rotary(), scores=some)
            for some in ((), (scores.Alibi(),))
        )
        return Decoder(1 + scan, DecoderBlock(layer, 8, cross_attention=cross), scan=scan)

    plain, cached = model(False), model(True)
    v = variables(plain, X, MEMORY)
    wanted = np.asarray(jax.jit(plain.apply)(v, X, MEMORY))
    held = variables(cached, X, MEMORY)
    for t in range(4):
        out, held = run(cached, held, X[:, t : t + 1], MEMORY)
        close(out[:, 0], wanted[:, t])
    back = {**v, "cache": cache.truncate(held["cache"], 2)}
    close(run(cached, back, X[:, 2:3])[0][:, 0], wanted[:, 2])
    # A memory that is made while self-attention counts is counted as well.
    own = {n: {"attention": x["attention"]} for n, x in cache.reset(held["cache"]).items()}
    out, held = run(cached, {**v, "cache": own}, X[:, :2], MEMORY)
    close(out, wanted[:, :2])
    close(run(cached, held, X[:, 2:3])[0][:, 0], wanted[:, 2])


def test_encoded_inputs_are_inputs_k_without_decoding() -> None:
    layer = MultiHeadAttention(2)
    call = functools.partial(layer.apply, variables(layer, X, MEMORY), X)

    @jax.jit
    def pairs(k: jax.Array, v: jax.Array) -> Any:
        several = (k,), (k, v)
        return [(call(kv=Encoded(*inputs)), call(*inputs)) for inputs in several]

    for found, wanted in pairs(MEMORY, 2 * MEMORY):
        np.testing.assert_array_equal(found, wanted)


def test_a_cache_says_which_calls_it_takes() -> None:
    layer = MultiHeadAttention(2, decode=True)
    tokens, encoded = variables(layer, X), variables(layer, X, kv=Encoded(MEMORY))
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
