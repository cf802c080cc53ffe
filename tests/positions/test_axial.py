"""Rotary embeddings on several axes, against the formulas pair by pair, and in the layer."""

import math
from typing import Any

import jax
import numpy as np
import pytest

from flax_mha import MultiHeadAttention, masks
from flax_mha.positions import Axial, Llama3, MRope, Rotary
from tests.support import oracle
from tests.support.arrays import random_variables
from tests.support.decoding import decoded
from tests.support.oracle import error

RNG = np.random.default_rng(0)
KEY = jax.random.key(0)


def rotated(x: np.ndarray, angle: Any, interleaved: bool = False) -> np.ndarray:
    """Return x with pair p of token i, as a complex number, times e^(i·angle(i, p)), in float64."""
    out, half = np.array(x, np.float64), x.shape[-1] // 2
    for i in range(x.shape[-3]):
        for p in range(half):
            a, b = (2 * p, 2 * p + 1) if interleaved else (p, p + half)
            z = (x[..., i, :, a] + 1j * x[..., i, :, b]) * np.exp(1j * angle(i, p))
            out[..., i, :, a], out[..., i, :, b] = z.real, z.imag
    return out


@pytest.mark.parametrize(
    ("sizes", "span", "prefix"),
    [((5,), None, 0), ((3, 4), 2 * math.pi, 2), ((2, 3, 2), None, 2), ((2, 3, 2), 2 * math.pi, 0)],
)
def test_axial_matches_formula(sizes: tuple[int, ...], span: float | None, prefix: int) -> None:
    T, H = prefix + math.prod(sizes), 12
    x = RNG.normal(size=(2, T, 3, H)).astype(np.float32)
    share = H // 2 // len(sizes)

    def angle(i: int, p: int) -> float:
        if i < prefix:
            return 0.0
        axis = p // share
        c: float = float(np.unravel_index(i - prefix, sizes)[axis])
        if span is not None:
            c = span * (2 * (c + 0.5) / sizes[axis] - 1)
        return c / 50 ** (p % share / share)

    rotation = Axial(sizes, 50.0, span, prefix)
    found = jax.jit(lambda x: rotation(x, np.arange(T)))(x)
    assert error(found, rotated(x, angle)) < 1e-6


def test_axial_positions_beyond_grid_raise_or_give_nan() -> None:
    """The layer refuses more tokens than grid positions. Traced positions give NaN."""
    layer = MultiHeadAttention(2, rotary=Axial((2, 2)))
    x = np.ones((1, 6, 16), np.float32)
    with pytest.raises(ValueError, match=r"positions must be in 0 … 3, got 4; raise Axial\.sizes"):
        jax.eval_shape(layer.init, KEY, x)
    turn = jax.jit(Axial((2, 2), prefix=1))
    heads = RNG.normal(size=(1, 6, 1, 8)).astype(np.float32)
    found = np.asarray(turn(heads, np.array([0, 1, 4, 5, -1, 2])))
    np.testing.assert_array_equal(np.isnan(found).any((0, 2, 3)), [0, 0, 0, 1, 1, 0])
    assert np.isnan(found[0, 3:5]).all()


@pytest.mark.sampled(0.08)
def test_mrope_matches_formula() -> None:
    T, H, sections = 6, 16, (2, 3, 3)
    x = RNG.normal(size=(2, T, 3, H)).astype(np.float32)
    at = RNG.integers(0, 30, (T, 3))
    of = np.repeat(np.arange(3), sections)
    rotation = MRope(sections, 50.0)
    turn = jax.jit(lambda x: [rotation(x, n) for n in (at, np.stack([at, at]), np.arange(T))])
    actual, of_rows, of_text = turn(x)
    expected = rotated(x, lambda i, p: at[i, of[p]] / 50 ** (2 * p / H))
    assert error(actual, expected) < 2e-6
    np.testing.assert_allclose(of_rows, actual, atol=1e-6)
    np.testing.assert_allclose(of_text, oracle.rotary(x, np.arange(T), base=50.0), atol=1e-6)


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize(
    ("rotary", "positions"),
    [
        (Axial((3, 4), 50.0), None), (MRope((1, 1, 2), 50.0), RNG.integers(0, 9, (12, 3))),
        (Rotary(5e5, scaling=Llama3(8.0, 16)), None),
    ],
)  # fmt: skip
def test_layer_that_rotates_decodes_like_full_forward(rotary: Any, positions: Any) -> None:
    x = RNG.normal(size=(2, 12, 16)).astype(np.float32)
    layer = MultiHeadAttention(2, rotary=rotary, mask=masks.Causal())
    params = random_variables(layer, x)

    @jax.jit
    def both(x: jax.Array) -> Any:
        bare = layer.clone(rotary=None).apply(params, x)
        return layer.apply(params, x, positions=positions), bare

    whole, bare = both(x)
    stepwise = decoded(layer.clone(decode=True), params, x, positions=positions)
    assert error(stepwise, whole) < 2e-6
    assert error(bare, whole) > 1e-2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: Axial((2, 2, 2))(x, np.arange(4)), "must be a multiple of 6, got 8"),
        (lambda x: Axial((2, 2))(x, np.arange(3)), "positions must have shape"),
        (lambda x: MRope((1, 1))(x, np.arange(4)), "must have H/2 pairs in all"),
        (lambda x: MRope((2, 2))(x, np.zeros((4, 3), int)), "a coordinate for each section"),
    ],
)
def test_invalid_sizes_and_positions_raise(make: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make(np.ones((1, 4, 1, 8), np.float32))
