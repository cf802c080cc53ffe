"""Caches by their laws: steps equal the full forward, a ring equals the full cache, rows are
ragged.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_mha import (
    CacheConfig,
    Capture,
    MultiHeadAttention,
    Platform,
    dot_product_attention,
    masks,
    scores,
)
from flax_mha.cache import KVCache
from flax_mha.kernels.call.bind import bind_call
from flax_mha.kernels.call.stored import dequantize
from flax_mha.kernels.xla import decode, reference
from flax_mha.masks import Causal, Lengths, Prefix, Window
from flax_mha.positions import Rotary
from tests.support.oracle import random_like

B, T, D = 2, 12, 16
KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, T, D)).astype(np.float32)
pytestmark = pytest.mark.usefixtures("small_blocks")
# Float32 rounds at 6e-8, and a blocked softmax adds in another order.
CLOSE = 1e-5

TABLE = jnp.asarray(RNG.normal(size=(4, 8)), jnp.float32)
# The layer's fields, and the mask of its calls or None.
LAYERS: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({}, None),
    "rotary, gqa, dv": ({"rotary": Rotary(), "num_kv_heads": 2, "v_head_dim": 3}, None),
    "alibi, mqa": ({"scores": (scores.Alibi(),), "num_kv_heads": 1}, None),
    "t5, sinks": ({"scores": (scores.RelativeBias(TABLE, False),), "sinks": True}, None),
    "window": ({"mask": Window(3, 0), "rotary": Rotary()}, None),
    "window, cap": ({"mask": Window(4), "scores": (scores.SoftCap(2.0),)}, None),
    "qk-norm": ({"normalize_qk": True}, None),
    "prefix": ({"mask": Prefix(5)}, None),
    "lengths": ({}, Lengths(jnp.array([12, 7]))),
    "key padding": ({}, jnp.asarray(np.arange(T) != np.array([2, 5])[:, None, None, None])),
}  # fmt: skip


def close(got: Any, wanted: Any, atol: float = CLOSE) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(wanted), atol=atol, rtol=0)


@functools.cache
def built(name: str, **more: Any) -> tuple[MultiHeadAttention, Any, Callable[..., Any], Any]:
    """Return a layer that decodes, its variables, its step function, and its full forward of X."""
    fields, mask = LAYERS[name]
    layer = MultiHeadAttention(4, decode=True, **fields, **more)
    variables = jax.eval_shape(layer.init, KEY, X)
    params = {"params": random_like(variables["params"])}
    held = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), variables["cache"])
    whole = layer.clone(decode=False, cache=None)
    expected = jax.jit(whole.apply)(params, X, mask=masks.combine(Causal(), mask))

    @jax.jit
    def step(variables: Any, x: jax.Array, **call: Any) -> Any:
        # Arrays over the keys cover all slots.
        given = None if mask is None else mask
        return layer.apply({**params, "cache": variables}, x, mask=given, mutable=["cache"], **call)

    return layer, held, step, expected


def stepped(step: Callable[..., Any], held: Any, sizes: Sequence[int]) -> tuple[np.ndarray, Any]:
    """Return the outputs of X in calls of these sizes, and the cache."""
    outs = []
    for x in np.split(X, np.cumsum(sizes)[:-1], axis=1):
        out, new = step(held, x)
        held = new["cache"]
        outs.append(out)
    return np.concatenate(outs, 1), held


# A prompt and steps; or steps of several tokens and a second prompt.
@pytest.mark.sampled(0.054)
@pytest.mark.parametrize(
    ("name", "sizes"),
    [*((name, (7, 1, 1, 1, 1, 1)) for name in LAYERS), ("plain", (1, 3, 8))],
    ids=str,
)
def test_steps_match_full_forward(name: str, sizes: tuple[int, ...]) -> None:
    _, held, step, expected = built(name)
    outs, held = stepped(step, held, sizes)
    close(outs, expected)
    np.testing.assert_array_equal(held["kv"].length, T)


@pytest.mark.slow
@settings(max_examples=20)
@given(
    st.sampled_from([*((name, False) for name in LAYERS), ("window", True)]),
    st.lists(st.tuples(*[st.integers(0, 4)] * B), min_size=3, max_size=8),
)
def test_ragged_rows_decode_as_if_alone(
    layer: tuple[str, bool], counts: list[tuple[int, ...]]
) -> None:
    """Each row continues at its own length, however it is split. Padding is inert."""
    name, ring = layer
    _, held, step, expected = built(name, **({"cache": CacheConfig(slots=5)} if ring else {}))
    at = np.zeros(B, int)
    for count in np.minimum(counts, 4):
        count = np.minimum(count, T - at)
        x = np.full((B, 4, D), 7.0, np.float32)
        for row in range(B):
            x[row, : count[row]] = X[row, at[row] : at[row] + count[row]]
        out, new = step(held, x, lengths=jnp.asarray(count))
        held = new["cache"]
        for row in range(B):
            close(out[row, : count[row]], expected[row, at[row] : at[row] + count[row]])
        at += count
    np.testing.assert_array_equal(held["kv"].length, at)


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("size", [4, 6])
def test_ring_matches_full_cache(size: int) -> None:
    """A prompt longer than the ring, calls that wrap, and calls that fit next to the window."""
    _, held, step, expected = built("window", cache=CacheConfig(slots=size))
    assert held["kv"].key.shape[-2] == size
    for sizes in [(9, 3), (3, 3, 3, 3)]:
        close(stepped(step, held, sizes)[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bound"), [
    ("int8", 0.03), ("bfloat16", 0.02), ("float8_e4m3fn", 0.1), ("float8_e5m2", 0.2),
])  # fmt: skip
def test_narrow_cache_dtype_changes_output_within_bound(dtype: str, bound: float) -> None:
    """The output changes a little, independently of how the tokens were split into calls."""
    _, held, step, expected = built("rotary, gqa, dv", cache=CacheConfig(dtype))
    assert held["kv"].key.dtype == dtype
    whole, _ = step(held, X)
    close(stepped(step, held, (7, 1, 4))[0], whole)
    assert 0 < np.abs(whole - expected).max() < bound * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "of_itself", "of_largest"), [
    ("int8", 0, 1 / 254), ("float8_e4m3fn", 2**-4, 2**-10 / 448),
    ("float8_e5m2", 2**-3, 2**-17 / 57344),
])  # fmt: skip
@given(st.integers(0, 99), st.floats(1e-30, 1e36))
def test_rounding_in_8_bits_is_within_half_a_step(
    dtype: str, of_itself: float, of_largest: float, seed: int, size: float
) -> None:
    x = jax.random.normal(jax.random.key(seed), (3, 2, 8)) * size
    held = KVCache.empty((), 3, 2, 8, dtype=dtype).append(x, x.at[1].set(0))
    x = np.asarray(x, np.float64).swapaxes(0, 1)
    key, scale = np.asarray(held.key, np.float64), np.asarray(held.key_scale, np.float64)
    step = np.maximum(of_itself * np.abs(x), of_largest * np.abs(x).max(-1, keepdims=True))
    assert (np.abs(key * scale[..., None] - x) <= step * (1 + 1e-5)).all()
    np.testing.assert_array_equal(held.value[:, 1], 0)


@pytest.mark.sampled(0)
def test_kv_cache_works_under_vmap_and_scan() -> None:
    q, k, v = (jnp.asarray(RNG.normal(size=(3, T, 4, 8)), jnp.float32) for _ in range(3))
    k, v = k[:, :, :2], v[:, :, :2, :5]

    def alone(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[KVCache, jax.Array]:
        def step(held: KVCache, qkv: Any) -> tuple[KVCache, jax.Array]:
            out, held = held.extend(*(x[None] for x in qkv))
            return held, out[0]

        return jax.lax.scan(step, KVCache.empty((), T, 2, 8, 5), (q, k, v))

    held, outs = jax.jit(jax.vmap(alone))(q, k, v)
    whole = KVCache.empty((3,), T, 2, 8, 5)
    expected, full = whole.extend(q, k, v)
    close(outs, expected)
    close(held.key, full.key)
    np.testing.assert_array_equal(held.free(), 0)
    close(
        full.fork(jnp.array([2, 0])).truncate(3).extend(q[:2, :1], k[:2, :1], v[:2, :1])[1].length,
        4,
    )


# Large finite values, infinity and NaN.
VALUES = (1e5, 3.4e38, np.inf, np.nan)


@functools.partial(jax.jit, static_argnames="mask")
def extend(held: KVCache, q: Any, k: Any, v: Any, **call: Any) -> Any:
    return held.extend(q, k, v, **call)


@pytest.mark.sampled(0.054)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2"]
)
def test_any_value_reaches_only_those_that_see_it(dtype: str, window: int | None) -> None:
    """After `reset`, `truncate` or `fork`, and beyond a window, an earlier token moves no bit.

    Row 0 is sound, and the last row is new. The others have one bad number, in the third key or
    the third value of their second head of keys.
    """
    rows = 2 * len(VALUES) + 2
    qkv = [np.repeat(RNG.normal(size=(1, 12, n, 4)).astype("f"), rows, 0) for n in (4, 2, 2)]
    for i, x in enumerate(VALUES):
        qkv[1][1 + 2 * i, 2, 1, 3] = qkv[2][2 + 2 * i, 2, 1, 3] = x
    lengths = np.array([5] * (rows - 1) + [0])
    empty = KVCache.empty((rows,), 8 if window else 12, 2, 4, dtype=dtype, window=window)
    _, held = extend(empty, *(x[:, :5] for x in qkv), lengths=lengths)
    assert np.isfinite(held.value.astype(jnp.float32)).all()
    finite = np.repeat(np.isfinite(VALUES), 2)
    assert np.isfinite(held.key.astype(jnp.float32)[1:-1][finite]).all()
    # Tokens after the third of the sound row, for every row.
    sound = [np.repeat(x[:1], rows, 0) for x in qkv]

    def run(held: KVCache, start: int, stop: int, **call: Any) -> np.ndarray:
        return np.asarray(extend(held, *(x[:, start:stop] for x in sound), **call)[0])

    def check(held: KVCache, start: int, stop: int, count: int = rows, **call: Any) -> None:
        out = run(held, start, stop, **call)[:count]
        np.testing.assert_array_equal(out, np.repeat(out[:1], count, 0))

    for stop in (3, 6):  # 6: more than the kernel `decode` takes
        check(held.reset(), 0, stop)
    check(held.truncate(1), 1, 4, rows - 1)
    check(held.fork(np.zeros(rows, int)), 5, 8)
    check(held, 5, 6, rows - 1, mask=Window(2, 0))
    # A token that sees the bad one has NaN for NaN and infinity, in the heads of its keys.
    out = run(held, 5, 6)[1:-1]
    np.testing.assert_array_equal(out[:, :, :2], np.repeat(out[:1, :, :2], rows - 2, 0))
    assert np.isnan(out[~finite][:, :, 2:]).all()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_float16_queries_read_any_number_of_a_cache(dtype: str) -> None:
    """Hidden large values reach nothing, and weights times small scales lose no digits."""
    q, x = np.ones((1, 1, 1, 4), np.float16), np.full((1, 256, 1, 4), 2e-4, np.float32)
    x[0, 0] = 1e5

    @jax.jit
    def run(q: jax.Array, x: jax.Array) -> Any:
        keys, _ = KVCache.empty((1,), 256, 1, 4, dtype=dtype).extended(x, x)
        q, *kv, spec = bind_call(q, keys.key, keys.value, mask=Window(254, 0), q_positions=255)
        kernels = (decode, kv), (reference, map(dequantize, kv))
        specs = [spec.replace(platform=Platform(name)) for name in ("cpu", "gpu")]
        return [module.attend(q, *kv, spec)[0] for module, (*kv,) in kernels for spec in specs]

    for out in run(q, x):
        close(out, np.full(q.shape, 2e-4), 2e-6)


def test_captured_scores_of_a_prompt_are_over_the_slots() -> None:
    """A prompt of more than 64 tokens into an empty cache may skip the cache, but not here."""
    T, S = 66, 80
    qkv = RNG.normal(size=(3, 1, T, 2, 4)).astype(np.float32)

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        capture = Capture(("scores", "max_logit"))
        found, _ = KVCache.empty((1,), S, 2, 4).extend(q, k, v, capture=capture)
        return found, dot_product_attention(q, k, v, mask=Causal(), capture=capture)

    (out, captured), (want, expected) = run(*qkv)
    assert captured["scores"].shape == (1, 2, T, S)
    np.testing.assert_allclose(captured["scores"][..., :T], expected["scores"], atol=1e-5)
    np.testing.assert_allclose(captured["max_logit"], expected["max_logit"], atol=1e-5)
    np.testing.assert_allclose(out, want, atol=1e-5)
