"""At a cache's limits: lost tokens give NaN, the others stay valid, truncated rows continue."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from flax_mha import (
    CacheConfig,
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
X = jnp.asarray(RNG.normal(size=(2, 12, D)), jnp.float32)
MEMORY = jnp.asarray(RNG.normal(size=(2, 3, D)), jnp.float32)
CLOSE = 2e-5
# Truncations of a ring of 8 slots, 10 tokens and a window of 2; True if too much is lost.
CUTS = [((4,), False), ((3,), True), ((4, 2), True), ((5, 4), False), ((4, 0), False)]


def close(got: Any, wanted: Any) -> None:
    np.testing.assert_allclose(got, wanted, atol=CLOSE, rtol=0)


@functools.cache
def built(layers: int, scan: bool = False, cross: bool = False, ring: bool = False) -> Any:
    """Return a decoding stack's step function, its empty cache, and its full forward."""
    fields = {"mask": Window(2, 0), "cache": CacheConfig(slots=SLOTS)} if ring else {}
    layer = MultiHeadAttention(2, decode=True, rotary=Rotary(), **fields)
    plain = layer.clone(decode=False, cache=None)
    memory = (MEMORY,) if cross else ()

    def stack(layer: MultiHeadAttention, other: MultiHeadAttention) -> Any:
        if cross:
            return Decoder(layers, DecoderBlock(layer, 8, cross_attention=other), scan=scan)
        return Encoder(layers, EncoderBlock(layer, 8), scan=scan)

    model = stack(layer, MultiHeadAttention(2, decode=True))
    shapes = jax.eval_shape(model.init, KEY, X[:, :SLOTS], *memory)
    params = {"params": random_like(shapes["params"])}
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes["cache"])
    if ring:
        empty = jax.tree.map(lambda x: x if x.dtype != jnp.int32 or x.ndim else x + 2, empty)

    @jax.jit
    def step(held: Any, x: jax.Array, lengths: Any = None) -> tuple[jax.Array, Any]:
        variables = {**params, "cache": held}
        out, new = model.apply(variables, x, *memory, lengths=lengths, mutable=["cache"])
        return out, new["cache"]

    @jax.jit
    def whole(x: jax.Array) -> jax.Array:
        return stack(plain, MultiHeadAttention(2)).apply(params, x, *memory, mask=Causal())

    return step, empty, whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "scan", "cross"),
    [
        (2, True, True),
        pytest.param(1, False, False, marks=pytest.mark.slow),
        pytest.param(3, False, False, marks=pytest.mark.slow),
    ],
)
def test_truncated_overflowed_row_is_valid_again(layers: int, scan: bool, cross: bool) -> None:
    """In every layer: a call beyond the end stores the tokens that fit, and no NaN."""
    step, held, whole = built(layers, scan, cross)
    expected = whole(X)
    # Row 0 has four tokens and room for two of the next five; row 1 has two and room for three.
    _, held = step(held, X[:, :5], jnp.array([4, 2]))
    x = jnp.stack([X[0, 4:9], X[1, 2:7]])
    out, held = step(held, x, jnp.array([5, 3]))
    np.testing.assert_array_equal(cache.free(held), [0, 1])
    close(out[0, :2], expected[0, 4:6])
    assert np.isnan(out[0, 2:]).all()
    # Padding beyond the end is no overflow.
    close(out[1, :3], expected[1, 2:5])
    assert np.isfinite(out[1]).all()
    # Past the end, nothing more is lost.
    over, held = step(held, x, jnp.array([1, 0]))
    assert np.isnan(over[0, 0]).all()
    for keep in (6, 5, 3):
        back = cache.truncate(held, keep)
        if keep == 6:
            over, _ = step(back, x, jnp.array([1, 0]))
            assert np.isnan(over[0, 0]).all()
            continue
        new = jnp.stack([X[0, keep : keep + 5], X[1, keep : keep + 5]])
        out, _ = step(back, new, jnp.array([6 - keep] * 2))
        close(out[:, : 6 - keep], expected[:, keep:6])
    out, _ = step(cache.reset(held), X[:, :5])
    close(out, expected[:, :5])


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_wrapped_ring_can_be_emptied(scan: bool) -> None:
    step, held, whole = built(2, scan, ring=True)
    expected = whole(X)
    for start in (0, 5):
        out, held = step(held, X[:, start : start + 5])
    close(out, expected[:, 5:10])
    for empty in (cache.reset(held), cache.truncate(held, jnp.array([0, 8]))):
        out, after = step(empty, X[:, :5])
        close(out[0], expected[0, :5])
    close(step(after, X[:, 5:10])[0][0], expected[0, 5:10])
    # A row that lost tokens it needs stays lost until it is emptied.
    lost = cache.truncate(held, 3)
    for row in (lost, cache.truncate(lost, 3)):
        out, row = step(row, X[:, :5])
        assert np.isnan(out).all()
    out, _ = step(cache.reset(row), X[:, :5])
    close(out, expected[:, :5])


def heads() -> list[jax.Array]:
    return [jnp.asarray(RNG.normal(size=(1, 12, 2, 4)), jnp.float32) for _ in range(3)]


@pytest.mark.slow
def test_ring_remembers_overwritten_tokens_over_two_truncations() -> None:
    q, k, v = heads()
    expected = dot_product_attention(q, k, v, mask=Window(2, 0))
    held = KVCache.empty((1,), 8, 2, 4, window=2)

    @jax.jit
    def step(held: KVCache, t: jax.Array) -> Any:
        return held.extend(*(jax.lax.dynamic_slice_in_dim(x, t, 1, 1) for x in (q, k, v)))

    for t in range(10):
        _, held = step(held, t)
    # Token 9 is in the slot that token 1 had; each token sees the two before it.
    for cuts, lost in CUTS:
        back = functools.reduce(KVCache.truncate, cuts, held)
        assert bool(back.overflowed[0]) == lost
        out, _ = step(back, cuts[-1])
        if lost:
            assert np.isnan(out).all()
        else:
            close(out[:, 0], expected[:, cuts[-1]])


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
    held = KVCache.empty((1,), 6, 2, 4, window=window).append(k[:, :4], v[:, :4])
    forked = jax.jit(KVCache.fork)(held, jnp.array([0, 1, -1]))
    np.testing.assert_array_equal(forked.overflowed, [False, True, True])
    cut = jax.jit(KVCache.truncate)(forked, jnp.array([2, 2, 2]))
    np.testing.assert_array_equal(cut.overflowed, [False, True, True])
    np.testing.assert_array_equal(cut.reset().overflowed, [False] * 3)
    below = jax.jit(KVCache.truncate)(held, -1)
    np.testing.assert_array_equal(below.overflowed, [True])


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_checkify_reports_overflow(scan: bool) -> None:
    """As docs/decoding.md says."""
    layer = MultiHeadAttention(2, decode=True)
    model = Encoder(2, EncoderBlock(layer, mlp_dim=8), scan=scan)
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
