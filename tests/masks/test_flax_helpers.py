"""Flax's helpers for masks return rules with the tables of Flax's arrays."""

import math
import re
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_mha
from flax_mha import combine_masks, make_attention_mask, make_causal_mask
from flax_mha.masks import AtLeast, Causal, Mask, combine

RNG = np.random.default_rng(0)
B, T, S = 2, 4, 5
IDS, OTHERS = RNG.integers(0, 3, (B, T)), RNG.integers(0, 3, (B, S))
REAL, VISIBLE = RNG.random((B, T)) < 0.7, RNG.random((B, S)) < 0.7


@pytest.fixture(autouse=True)
def as_users_have_it() -> Iterator[None]:
    """Flax's helpers promote dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("q", "kv", "fn"),
    [
        (REAL, VISIBLE, jnp.multiply),
        (REAL, VISIBLE, jnp.logical_and),
        (REAL, VISIBLE, jnp.bitwise_and),
        (REAL[0], VISIBLE[0], jnp.multiply),
        (REAL[:1], VISIBLE, jnp.multiply),
        (REAL[:, :1], VISIBLE, jnp.multiply),
        (IDS, OTHERS, jnp.equal),
        (IDS[:1], OTHERS[:1], jnp.equal),
        (IDS[0], OTHERS[0], jnp.equal),
        (IDS, OTHERS, jnp.greater_equal),
        (IDS[:1].astype(np.int8), OTHERS.astype(np.uint16), jnp.greater_equal),
        (IDS, OTHERS, jnp.less),
    ],
)
def test_rule_has_the_table_of_flax(q: Any, kv: Any, fn: Any, traced: bool) -> None:
    wanted = np.broadcast_to(nn.make_attention_mask(q, kv, fn, dtype=bool), (B, 1, T, S))

    def table(q: Any, kv: Any) -> jax.Array:
        mask: Any = make_attention_mask(q, kv, fn)
        assert isinstance(mask, Mask)
        return mask.dense(T, S, (B,))

    np.testing.assert_array_equal((jax.jit(table) if traced else table)(q, kv), wanted)


def test_rules_of_more_axes() -> None:
    """Axes of the batch broadcast from the last, as those of Flax's arrays."""
    ids = RNG.integers(0, 2, (3, 2, T))
    for q, extra in ((ids, 0), (ids[:, :1], 0), (ids[0], 0), (ids[0], 1), (ids[0, 0], 2)):
        wanted = nn.make_attention_mask(q, q, jnp.equal, extra, bool)
        mask: Any = make_attention_mask(q, q, jnp.equal, extra)
        found = mask.dense(T, batch=(3, 2))
        np.testing.assert_array_equal(found, np.broadcast_to(wanted, found.shape))


def test_causal_mask_is_causal_at_any_positions() -> None:
    assert make_causal_mask(IDS) == make_causal_mask(IDS[0], 2, jnp.bfloat16) == Causal()


@pytest.mark.parametrize(
    ("q", "fn"),
    [
        (REAL.astype(np.float32), jnp.multiply),
        (IDS, jnp.multiply),
        (IDS, jnp.not_equal),
        (REAL, jnp.equal),
        (IDS.astype(np.float32), jnp.greater_equal),
        (IDS.astype(np.uint32), jnp.greater_equal),
        (IDS, lambda q, kv: q == kv),
    ],
)
def test_other_functions_give_the_array_of_flax(q: Any, fn: Any) -> None:
    found = make_attention_mask(q, q, fn, 1, jnp.bfloat16)
    wanted = nn.make_attention_mask(q, q, fn, 1, jnp.bfloat16)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


def test_masks_combine() -> None:
    table = nn.make_causal_mask(IDS)
    assert combine_masks() is combine_masks(None, None) is combine(None) is None
    assert combine_masks(None, Causal()) == Causal()
    arrays = combine_masks(table, None, table, dtype=jnp.int32)
    np.testing.assert_array_equal(arrays, table)
    assert arrays.dtype == jnp.int32
    for mask in (combine_masks(table, Causal()), combine_masks(Causal(), table)):
        np.testing.assert_array_equal(mask.dense(T, batch=(B,)), table)


def test_numbers_default_to_those_of_queries() -> None:
    """Frames of a video: full within a frame, causal between frames."""
    frames = np.repeat(np.arange(2), 2)
    assert AtLeast(frames).show(4).splitlines()[:4] == ["██··", "██··", "████", "████"]


@pytest.mark.parametrize("source", ["flax", "here"])
def test_no_table_of_all_pairs_is_made(source: str) -> None:
    """Kernels read the rules block by block, while Flax's helpers make [B, 1, T, T]."""
    T = 2048
    tokens = jax.ShapeDtypeStruct((2, T), jnp.int32)
    use: Any = nn if source == "flax" else flax_mha
    x = jax.ShapeDtypeStruct((2, T, 4, 8), jnp.float32)

    def attend(x: jax.Array, tokens: jax.Array) -> jax.Array:
        mask = use.combine_masks(
            use.make_attention_mask(tokens > 0, tokens > 0), use.make_causal_mask(tokens),
            use.make_attention_mask(tokens, tokens, jnp.equal),
        )  # fmt: skip
        return jnp.sum(flax_mha.dot_product_attention(x, x, x, mask=mask))

    shapes = re.findall(r"\w\[([\d,]+)\]", str(jax.make_jaxpr(jax.grad(attend))(x, tokens)))
    made = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    assert (made >= 2 * T * T) == (source == "flax")
