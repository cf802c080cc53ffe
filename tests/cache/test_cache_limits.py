"""At a cache's limits: lost tokens give NaN, the others stay valid, truncated rows continue."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from flax_mha import (
    DecoderBlock,
    Encoder,
    EncoderBlock,
    MultiHeadAttention,
    cache,
    dot_product_attention,
)
from flax_mha.cache import KVCache
from flax_mha.masks import Causal, Window
from flax_mha.models import Decoder
from flax_mha.positions import Rotary
from tests.support.oracle import random_like

KEY = jax.random.key(0)
RNG = np.random.default_rng(3)
SLOTS, D = 6, 8
X = RNG.normal(size=(2, 12, D)).astype(np.float32)
MEMORY = np.repeat(RNG.normal(size=(1, 3, D)).astype(np.float32), 2, 0)
CLOSE = 2e-5
# Truncations of a ring of 8 slots, 10 tokens and a window of 2; True if too much is lost.
CUTS = [
    ((4,), False),
    ((3,), True),
    ((4, 2), True),
    ((5, 4), False),
    ((4, 0), False),
    ((3, 0), False),
]


def close(got: Any, wanted: Any) -> None:
    np.testing.assert_allclose(got, wanted, atol=CLOSE, rtol=0)


def built(layers: int, scan: bool, cross: bool) -> Any:
    """Return a decoding stack's step function, its empty cache, and its outputs without one."""

    def stack(decode: bool) -> Any:
        layer = MultiHeadAttention(2, decode=decode, rotary=Rotary())
        if not cross:
            return Encoder(layers, EncoderBlock(layer, 8), scan=scan)
        block = DecoderBlock(layer, 8, cross_attention=MultiHeadAttention(2, decode=decode))
        return Decoder(layers, block, scan=scan)

    model, memory = stack(decode=True), (MEMORY,) if cross else ()
    shapes = jax.eval_shape(model.init, KEY, X[:, :SLOTS], *memory)
    params = {"params": random_like(shapes["params"])}
    empty = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes["cache"])

    @jax.jit
    def step(held: Any, x: jax.Array, lengths: Any) -> tuple[jax.Array, Any]:
        variables = {**params, "cache": held}
        out, new = model.apply(variables, x, *memory, lengths=lengths, mutable=["cache"])
        return out, new["cache"]

    return step, empty, jax.jit(stack(decode=False).apply)(params, X, *memory, mask=Causal())


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize(("layers", "scan", "cross"), [(2, True, True), (2, False, False)])
def test_overflowed_row_is_valid_again(layers: int, scan: bool, cross: bool) -> None:
    """In every layer: a call beyond the end stores the tokens that fit, and no NaN."""
    step, empty, expected = built(layers, scan, cross)
    # Row 0 has four tokens and room for two of the next five; row 1 has two and room for three.
    _, held = step(empty, X[:, :5], np.array([4, 2]))
    x = np.stack([X[0, 4:9], X[1, 2:7]])
    out, held = step(held, x, np.array([5, 3]))
    np.testing.assert_array_equal(cache.free(held), [0, 1])
    close(out[0, :2], expected[0, 4:6])
    assert np.isnan(out[0, 2:]).all()
    # Padding beyond the end is no overflow.
    close(out[1, :3], expected[1, 2:5])
    assert np.isfinite(out[1]).all()
    # Past the end, nothing more is lost.
    over, held = step(held, x, np.array([1, 0]))
    assert np.isnan(over[0, 0]).all()
    with pytest.raises(
        ValueError, match=r"at most S.* got \(2, 7, 2, 4\) .*; initialize the cache"
    ):
        jax.eval_shape(step, held, X[:, :7], np.array([7, 7]))
    for keep in (6, 3):
        back = cache.truncate(held, np.array([keep, 5]))
        np.testing.assert_array_equal(cache.free(back), [6 - keep, 1])
        new = np.stack([X[0, keep : keep + 5], X[1, 5:10]])
        out, _ = step(back, new, np.array([3, 1]))
        assert np.isnan(out[0, 6 - keep : 3]).all()
        close(out[0, : min(3, 6 - keep)], expected[0, keep : min(keep + 3, 6)])
        close(out[1, 0], expected[1, 5])
    # Both rows continue row 1. A row that does not exist must not become a row of zeros.
    forked = cache.fork(held, np.array([1, 1]))
    out, _ = step(forked, np.stack([X[1, 5:10]] * 2), np.array([1, 1]))
    close(out[:, 0], np.stack([expected[1, 5]] * 2))
    out, _ = step(jax.jit(cache.fork)(held, np.array([1, 5])), X[:, 5:10], np.array([1, 1]))
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1, 0]).all()
    out, _ = step(cache.reset(held), X[:, :5], np.array([5, 5]))
    close(out, expected[:, :5])


def heads() -> np.ndarray:
    return RNG.normal(size=(3, 1, 12, 2, 4)).astype(np.float32)


def test_ring_remembers_overwritten_tokens_until_it_is_emptied() -> None:
    qkv = heads()
    expected = jax.jit(lambda q, k, v: dot_product_attention(q, k, v, mask=Window(2, 0)))(*qkv)
    extend = jax.jit(KVCache.extend)
    held = KVCache.empty((1,), 8, 2, 4, window=2)
    for t in range(10):
        _, held = extend(held, *qkv[:, :, t : t + 1])
    truncate = jax.jit(KVCache.truncate)
    # Token 9 is in the slot that token 1 had; each token sees the two before it.
    for cuts, lost in CUTS:
        back, t = functools.reduce(truncate, cuts, held), cuts[-1]
        assert bool(back.overflowed[0]) == lost
        out, _ = extend(back, *qkv[:, :, t : t + 1])
        if lost:
            assert np.isnan(out).all()
        else:
            close(out[:, 0], expected[:, t])


@pytest.mark.slow
def test_int8_ring_takes_prompt_longer_than_itself() -> None:
    """Old and new tokens keep their own scales, as in a full cache."""

    @jax.jit
    def run(*qkv: jax.Array) -> Any:
        ring = KVCache.empty((1,), 4, 2, 4, dtype="int8", window=2)
        whole = KVCache.empty((1,), 12, 2, 4, dtype="int8")
        outs = []
        for piece in (slice(3), slice(3, 12)):
            tokens = [x[:, piece] for x in qkv]
            out, ring = ring.extend(*tokens)
            expected, whole = whole.extend(*tokens, mask=Window(2, 0))
            outs.append((out, expected))
        return outs

    for out, expected in run(*heads()):
        close(out, expected)


@pytest.mark.parametrize("window", [None, 3])
def test_nonexistent_rows_are_lost_until_emptied(window: int | None) -> None:
    _, k, v = heads()

    @jax.jit
    def lost(k: jax.Array, v: jax.Array, rows: jax.Array) -> list[jax.Array]:
        held = KVCache.empty((1,), 6, 2, 4, window=window).append(k[:, :4], v[:, :4])
        forked = held.fork(rows)
        cut = forked.truncate(rows * 0 + 2)
        return [x.overflowed for x in (forked, cut, cut.reset(), held.truncate(rows[2:]))]

    found = lost(k, v, np.array([0, 1, -1]))
    for rows, expected in zip(found, ([0, 1, 1], [0, 1, 1], [0, 0, 0], [1]), strict=True):
        np.testing.assert_array_equal(rows, expected)


@pytest.mark.slow
def test_checkify_reports_overflow() -> None:
    """As docs/decoding.md says."""
    layer = MultiHeadAttention(2, decode=True)
    model = Encoder(2, EncoderBlock(layer, mlp_dim=8), scan=True)
    x = jnp.ones((2, 3, 8))
    variables = model.init(KEY, x)

    def step(variables, x):
        room = cache.free(variables["cache"])
        checkify.check((room >= x.shape[1]).all(), "no room: {room} left", room=room.min())
        return model.apply(variables, x, mutable=["cache"])

    checked = jax.jit(checkify.checkify(step))
    error, (_, new) = checked(variables, x)
    error.throw()
    error, (out, _) = checked({**variables, **new}, x[:, :1])
    assert np.isnan(out).all()
    with pytest.raises(checkify.JaxRuntimeError, match="no room: 0 left"):
        error.throw()
