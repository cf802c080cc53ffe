"""The dropout mask is a pure function of its coordinates, and as good as random."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha.kernels.call.dropout import WeightDropout

B, N, T, S = 3, 4, 96, 80


@functools.cache
def whole_mask(rate: float = 0.3, broadcast: bool = False) -> np.ndarray:
    return np.asarray(kept(WeightDropout.from_key(jax.random.key(0), rate, broadcast)))


def kept(dropout: WeightDropout) -> jax.Array:
    return dropout.keep(*map(jnp.asarray, np.ogrid[:B, :N, :T, :S]))


@pytest.mark.parametrize("rate", [0.01, 0.9])
def test_share_of_dropped_weights_is_rate(rate: float) -> None:
    mask = whole_mask(rate=rate)
    # Five standard deviations of a binomial.
    assert abs((1 - mask.mean()) - rate) < 5 * np.sqrt(rate * (1 - rate) / mask.size)


def test_rates_too_small_or_large_for_32_bits_are_safe() -> None:
    assert whole_mask(rate=1e-12).all()
    assert not whole_mask(rate=1 - 1e-12).any()


@pytest.mark.parametrize("axis", range(4))
def test_no_two_coordinates_share_a_pattern(axis: int) -> None:
    """Rows, heads, queries and keys are not correlated."""
    signs = np.moveaxis(2.0 * whole_mask(rate=0.5) - 1, axis, 0).reshape(
        whole_mask().shape[axis], -1
    )
    correlation = signs @ signs.T / np.sqrt(signs.shape[-1])
    np.fill_diagonal(correlation, 0)
    # The largest of thousands of standard normals is about 4.
    assert np.abs(correlation).max() < 5.5


@pytest.mark.parametrize("word", [0, 1])
def test_close_seeds_give_unrelated_masks(word: int) -> None:
    seed = jnp.array([5, 7], jnp.uint32)
    one, other = (np.asarray(kept(WeightDropout(s, 0.5))) for s in (seed, seed.at[word].add(1)))
    agree = np.mean(one == other)
    assert abs(agree - 0.5) < 5 * 0.5 / np.sqrt(B * N * T * S)


def test_keys_of_both_styles_and_any_implementation() -> None:
    typed = WeightDropout.from_key(jax.random.key(3), 0.5)
    legacy = WeightDropout.from_key(jax.random.PRNGKey(3), 0.5)
    np.testing.assert_array_equal(typed.seed, legacy.seed)
    other = WeightDropout.from_key(jax.random.key(3, impl="rbg"), 0.5)
    assert other.seed.shape == (2,)


def test_broadcast_is_one_pattern_for_all_rows_and_heads() -> None:
    mask = whole_mask(broadcast=True)
    np.testing.assert_array_equal(mask, np.broadcast_to(mask[:1, :1], mask.shape))
    assert 0.2 < 1 - mask.mean() < 0.4
