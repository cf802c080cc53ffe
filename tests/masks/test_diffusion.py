"""The mask of block diffusion, against its definition by three parts."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import dot_product_attention, masks
from flax_mha.base.coordinates import tiles_of, whole
from flax_mha.base.shapes import Dims
from flax_mha.masks.algebra import resolve


def allowed(n: int, block: int) -> np.ndarray:
    """Return the table of the paper: block diagonal, offset block-causal, block-causal."""
    i, j = np.arange(2 * n)[:, None], np.arange(2 * n)
    clean_i, clean_j, block_i, block_j = i >= n, j >= n, i % n // block, j % n // block
    diagonal = (block_i == block_j) & (clean_i == clean_j)
    offset = (block_i > block_j) & clean_j & ~clean_i
    causal = (block_i >= block_j) & clean_j & clean_i
    return diagonal | offset | causal


@pytest.mark.parametrize(("n", "block"), [(12, 4), (10, 4), (5, 1), (6, 6), (3, 8)])
def test_table_is_that_of_the_paper(n: int, block: int) -> None:
    table = masks.block_diffusion(n, block).dense(2 * n)[0]
    np.testing.assert_array_equal(table, allowed(n, block))


def test_tiles_are_exact_where_blocks_are_aligned() -> None:
    dims = Dims((), 128, 128, 1, 1, 1, 1)
    at = whole(dims)
    mask = resolve(masks.block_diffusion(64, 16).bind(dims), at)
    verdict = np.broadcast_to(mask.tiles(tiles_of(at.q, at.k, 16, 16)), (1, 8, 8))[0]
    some = allowed(64, 16).reshape(8, 16, 8, 16)
    np.testing.assert_array_equal(verdict, some.any((1, 3)).astype(int) + some.all((1, 3)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q: masks.block_diffusion(0, 4), "length must be at least 1, got 0"),
        (lambda q: masks.block_diffusion(4, -1), "block must be at least 1, got -1"),
        (lambda q: dot_product_attention(q, q, q, mask=masks.block_diffusion(4, 2)), r"\(8,\)"),
    ],
)
def test_wrong_sizes_raise(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(jnp.zeros((1, 10, 2, 4)))
