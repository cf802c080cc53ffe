"""Caches by their laws: steps equal the full forward, a ring equals the full cache, rows are
ragged.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
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
    Encoder,
    EncoderBlock,
    MultiHeadAttention,
    Platform,
    cache,
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
X = jnp.asarray(RNG.normal(size=(B, T, D)), jnp.float32)
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


def pieces(x: jax.Array, sizes: Sequence[int]) -> Iterator[jax.Array]:
    return iter(jnp.split(x, np.cumsum(sizes)[:-1].tolist(), axis=1))


# A prompt and steps; or steps of several tokens and a second prompt.
@pytest.mark.sampled(0.09)
@pytest.mark.parametrize(
    ("name", "sizes"),
    [*((name, (7, 1, 1, 1, 1, 1)) for name in LAYERS), ("plain", (1, 3, 8))],
    ids=str,
)
def test_steps_match_full_forward(name: str, sizes: tuple[int, ...]) -> None:
    _, held, step, expected = built(name)
    outs = []
    for x in pieces(X, sizes):
        out, new = step(held, x)
        held = new["cache"]
        outs.append(out)
    close(jnp.concatenate(outs, 1), expected)
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


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 6])
def test_ring_matches_full_cache(size: int) -> None:
    """Prompts longer than the ring, calls that wrap, and calls that fit beside the window."""
    _, held, step, expected = built("window", cache=CacheConfig(slots=size))
    assert held["kv"].key.shape[-2] == size
    for sizes in [(9, 1, 1, 1), (3, 3, 3, 3), (1,) * T]:
        now, outs = cache.reset(held), []
        for x in pieces(X, sizes):
            out, new = step(now, x)
            now = new["cache"]
            outs.append(out)
        close(jnp.concatenate(outs, 1), expected)
    # Tokens beyond the window can be truncated; truncating more marks the row as lost.
    back = cache.truncate(now, T - 2)  # After steps of one.
    out, _ = step(back, X[:, T - 2 : T - 1])
    assert np.isnan(out).all() == (size == 4)
    if size == 6:
        close(out, expected[:, T - 2 : T - 1])


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bound"), [
    ("int8", 0.03), ("bfloat16", 0.02), ("float8_e4m3fn", 0.1), ("float8_e5m2", 0.2),
])  # fmt: skip
def test_narrow_cache_dtype_changes_output_within_bound(dtype: str, bound: float) -> None:
    """The output changes a little, independently of how the tokens were split into calls."""
    _, held, step, expected = built("rotary, gqa, dv", cache=CacheConfig(dtype))
    assert held["kv"].key.dtype == dtype
    whole, _ = step(held, X)
    outs = []
    for x in pieces(X, (7, 1, 4)):
        out, new = step(held, x)
        held = new["cache"]
        outs.append(out)
    close(jnp.concatenate(outs, 1), whole)
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


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_cross_attention_projects_memory_once(dtype: str | None) -> None:
    memory, mask = X[:, :7, :8] * 2, Lengths(jnp.array([7, 4]))
    layer = MultiHeadAttention(4, num_kv_heads=2, decode=True, cache=CacheConfig(dtype))
    shapes = jax.eval_shape(lambda: layer.init(KEY, X, kv=cache.Encoded(memory)))
    params = {"params": random_like(shapes["params"])}
    assert set(shapes["cache"]) == {"memory"}
    expected = jax.jit(layer.clone(decode=False).apply)(params, X, memory, mask=mask)
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes["cache"])
    step = jax.jit(functools.partial(layer.apply, mask=mask, mutable=["cache"]))
    out, new = step({**params, "cache": empty}, X[:, :5], kv=cache.Encoded(memory))
    outs = [out]
    for t in range(5, T):
        out, new = step({**params, **new}, X[:, t : t + 1])
        outs.append(out)
    close(jnp.concatenate(outs, 1), expected, CLOSE if dtype is None else 1e-2)
    close(cache.fork(new["cache"], jnp.array([1]))["memory"].key, new["cache"]["memory"].key[1:])


@pytest.mark.sampled(0, slow=0.16)
@pytest.mark.parametrize("scan", [False, True])
def test_caches_of_model_fork_truncate_and_reset(scan: bool) -> None:
    layer = MultiHeadAttention(2, decode=True, rotary=Rotary())
    model = Encoder(2, EncoderBlock(layer, mlp_dim=8), scan=scan)
    variables = model.init(KEY, X)
    params = {"params": variables["params"]}
    plain = model.clone(block=model.block.clone(attention=layer.clone(decode=False)))
    step = jax.jit(lambda c, x: model.apply({**params, "cache": c}, x, mutable=["cache"]))
    expected = plain.apply(params, X, mask=Causal())

    _, new = step(variables["cache"], X[:, :6])
    rows = jnp.array([1, 1, 0])
    forked = cache.fork(new["cache"], rows)
    back = cache.truncate(forked, jnp.array([3, 6, 9]))
    assert cache.truncate({**params, "cache": forked}, 3)["params"] is not None
    np.testing.assert_array_equal(cache.free(back), [T - 3, T - 6, T - 6])
    tokens = jnp.stack([X[1, 3], X[1, 6], X[0, 6]])[:, None]
    out, new = step(back, tokens)
    close(out[:, 0], jnp.stack([expected[1, 3], expected[1, 6], expected[0, 6]]))
    out, _ = step(cache.reset(new["cache"]), X[rows, :1])
    close(out, expected[rows, :1])
    # A row that does not exist must not become a row of zeros.
    out, _ = step(jax.jit(cache.fork)(new["cache"], jnp.array([0, 5])), X[:, :1])
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()


@pytest.mark.slow
def test_overflow_gives_nan_and_can_be_truncated() -> None:
    _, held, step, expected = built("plain")
    _, new = step(held, X, lengths=jnp.array([T, 5]))
    out, now = step(new["cache"], X[:, :2], lengths=jnp.array([0, 2]))
    np.testing.assert_array_equal(cache.free(now["cache"]), [0, T - 7])
    out, now = step(new["cache"], X[:, 5:6])
    assert np.isnan(out[0]).all()
    close(out[1], expected[1, 5:6])
    # The row's earlier tokens are unchanged.
    out, _ = step(cache.truncate(now["cache"], T - 1), X[:, -1:])
    close(out[0], expected[0, -1:])


@pytest.mark.sampled(0, slow=0.16)
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


@pytest.mark.sampled(0.13, slow=0.2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e5m2"])
@pytest.mark.parametrize("T", [1, 3])
def test_nan_of_a_cached_token_reaches_only_those_that_see_it(dtype: str, T: int) -> None:
    """The cache holds a finite value and a NaN key for it."""
    q, k, v = (jnp.asarray(RNG.normal(size=(2, 9, n, 4)), jnp.float32) for n in (4, 2, 2))
    bad = v.at[0, 2, 1, 3].set(jnp.inf)
    outs, window = [], Window(3, 0)
    for values in (v, bad):
        held, out = KVCache.empty((2,), 12, 2, 4, dtype=dtype), []
        for t in range(0, 9, T):
            part = (x[:, t : t + T] for x in (q, k, values))
            y, held = held.extend(*part, mask=window)
            out.append(y)
        outs.append(jnp.concatenate(out, 1))
    assert np.isfinite(held.value.astype(jnp.float32)).all()
    nan = np.isnan(outs[1])
    assert nan[0, 2:6, 2:].all()
    assert nan.sum() == nan[0, 2:6, 2:].size
    close(jnp.where(nan, 0, outs[1]), jnp.where(nan, 0, outs[0]), 0)


@pytest.mark.sampled(0.1, slow=0.2)
@pytest.mark.parametrize("x", [1e5, 3.4e38, np.inf, np.nan], ids=str)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2"]
)
def test_rows_are_served_as_new_after_any_value(dtype: str, window: int | None, x: float) -> None:
    """After `reset`, `truncate` or `fork`, and beyond a window, an earlier token moves no bit."""
    q, k, v = (jnp.asarray(RNG.normal(size=(2, 80, n, 4)), jnp.float32) for n in (4, 2, 2))
    size = 8 if window else 80
    empty, rows = KVCache.empty((2,), size, 2, 4, dtype=dtype, window=window), jnp.array([1, 1])
    bad, sees_none = np.array([0, 2, 1, 3]), Window(2, 0)

    def run(held: KVCache, start: int, T: int, k: Any = k, v: Any = v, **call: Any) -> Any:
        return held.extend(*(y[:, start : start + T] for y in (q, k, v)), **call)

    sound = run(empty, 0, 5)[1]
    for changed in ({"k": k.at[*bad].set(x)}, {"v": v.at[*bad].set(x)}):
        held = run(empty, 0, 5, **changed)[1]
        assert np.isfinite(held.value.astype(jnp.float32)).all()
        if np.isfinite(x):
            assert np.isfinite(held.key.astype(jnp.float32)).all()
        for T in (3, 6 if window else 70):  # 70: more than the kernel `decode` takes
            pairs = [(held.reset(), empty, 0), (held.truncate(1), sound.truncate(1), 1)]
            for after, new, start in (*pairs, (held.fork(rows), sound.fork(rows), 5)):
                np.testing.assert_array_equal(run(after, start, T)[0], run(new, start, T)[0])
        np.testing.assert_array_equal(*(run(c, 5, 1, mask=sees_none)[0] for c in (held, sound)))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_float16_queries_read_any_number_of_a_cache(dtype: str, platform: str) -> None:
    """Hidden large values reach nothing, and weights times small scales lose no digits."""
    q, x = jnp.ones((1, 1, 1, 4), jnp.float16), jnp.full((1, 256, 1, 4), 2e-4).at[0, 0].set(1e5)
    keys, _ = KVCache.empty((1,), 256, 1, 4, dtype=dtype).extended(x, x)
    *args, spec = bind_call(q, keys.key, keys.value, mask=Window(254, 0), q_positions=255)
    for module in (decode, reference):
        k, v = args[1:] if module is decode else map(dequantize, args[1:])
        out, _ = module.attend(args[0], k, v, spec.replace(platform=Platform(platform)))
        close(out, np.full(q.shape, 2e-4), 2e-6)


@pytest.mark.sampled(0.25, slow=0.2)
@pytest.mark.parametrize("jitted", [False, True])
def test_captured_scores_of_a_prompt_are_over_the_slots(jitted: bool) -> None:
    """A prompt of more than 64 tokens into an empty cache may skip the cache, but not here."""
    T, S = 66, 80
    q, k, v = (
        jnp.asarray(np.random.default_rng(i).normal(size=(1, T, 2, 4)), "f4") for i in range(3)
    )

    def extend(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        empty = KVCache.empty((1,), S, 2, 4)
        return empty.extend(q, k, v, capture=Capture(("scores", "max_logit")))[0]

    out, captured = (jax.jit(extend) if jitted else extend)(q, k, v)
    call = {"mask": masks.Causal(), "capture": Capture(("scores", "max_logit"))}
    want, expected = dot_product_attention(q, k, v, **call)
    assert captured["scores"].shape == (1, 2, T, S)
    np.testing.assert_allclose(captured["scores"][..., :T], expected["scores"], atol=1e-5)
    np.testing.assert_allclose(captured["max_logit"], expected["max_logit"], atol=1e-5)
    np.testing.assert_allclose(out, want, atol=1e-5)
