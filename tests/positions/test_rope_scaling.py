"""Scalings of rotary embeddings, against their formulas pair by pair."""

import math
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import flax_mha.nnx
from flax_mha import DecoderBlock, MultiHeadAttention, variants
from flax_mha.positions import (
    DynamicNtk,
    Interpolation,
    Llama3,
    LongRope,
    Ntk,
    Proportional,
    Rotary,
    Yarn,
)
from flax_mha.positions.rope_scaling import Scaling
from tests.positions.test_axial import rotated
from tests.support.arrays import random_variables
from tests.support.oracle import random_like

KEY = jax.random.key(0)
R, LONG = 64, 1_000_000


def theta(c: int, base: float, R: int = R) -> float:
    return math.exp(-2 * c / R * math.log(base))


def yarn(
    c: int, base: float, factor: float, length: int, fast: float, slow: float, R: int = R
) -> float:
    """Return pair c's frequency, after Peng et al.: a ramp over the pairs between the betas."""

    def crossing(turns: float) -> float:
        # length·θ_c / 2π = turns, solved for c.
        return R / 2 * math.log(length / (2 * math.pi * turns)) / math.log(base)

    low, high = math.floor(crossing(fast)), math.ceil(crossing(slow))
    share = min(1.0, max(0.0, (c - low) / (high - low)))
    return theta(c, base, R) * (1 - share) + theta(c, base, R) / factor * share


def llama(c: int, base: float, factor: float, length: int, R: int = R) -> float:
    plain = theta(c, base, R)
    wavelength = 2 * math.pi / plain
    if wavelength < length / 4:
        return plain
    if wavelength > length / 1:
        return plain / factor
    smooth = (length / wavelength - 1) / (4 - 1)
    return (1 - smooth) * plain / factor + smooth * plain


def check_rows(scaling: Any, positions: np.ndarray, angle: Any) -> None:
    """Check each row, rotated by angles for its length, against rotations written out."""
    x = np.random.default_rng(0).normal(size=(*positions.shape, 1, 8)).astype(np.float32)
    got = jax.jit(Rotary(100.0, scaling=scaling))(x, positions)
    size = getattr(scaling, "attention_factor", 1.0)
    for i, row in enumerate(positions):
        want = rotated(x[i], lambda t, c, row=row: row[t] * angle(c, row.max() + 1))
        np.testing.assert_allclose(got[i], size * want, atol=1e-5)


ROWS = np.array([[0, 1, 2, 3], [3, 4, 5, 6], [9, 20, 30, 39]])


def test_dynamic_ntk_grows_base_with_row_length() -> None:
    """From emozilla's code: base·(factor·L/original − (factor − 1))^(R/(R−2))."""

    def angle(c: int, length: int) -> float:
        base = 100.0 * (4.0 * max(length, 7) / 7 - 3) ** (8 / 6)
        return base ** (-2 * c / 8)

    check_rows(DynamicNtk(4.0, 7), ROWS, angle)


def test_long_rope_uses_short_and_long_factors() -> None:
    short, long = (1.0, 1.5, 2.0, 3.0), (2.0, 4.0, 8.0, 16.0)

    def angle(c: int, length: int) -> float:
        return 100.0 ** (-2 * c / 8) / (long if length > 7 else short)[c]

    check_rows(
        LongRope(short, long, 7, attention_factor=1.2), np.vstack([ROWS, ROWS + LONG]), angle
    )


NTK, LONG_ROPE = DynamicNtk(4.0, 8), LongRope((1.0,) * 4, (4.0,) * 4, 8)
LAYERS: dict[str, Any] = {
    "ntk": MultiHeadAttention(2, rotary=Rotary(scaling=NTK), decode=True),
    "latent": variants.MultiHeadLatentAttention(
        2, rotary=Rotary(scaling=LONG_ROPE), rope_dim=8, kv_rank=4, decode=True
    ),
}


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("name", LAYERS)
def test_a_padded_row_is_rotated_as_if_alone(name: str) -> None:
    """With a cache, in nnx, and of an encoder's output. The row outgrows the original length."""
    x, layer = np.random.default_rng(0).normal(size=(2, 12, 16)).astype(np.float32), LAYERS[name]
    shapes = jax.eval_shape(layer.init, KEY, np.zeros((2, 24, 16), np.float32))
    params = {"params": random_like(shapes["params"])}
    rows = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes["cache"])
    one = jax.tree.map(lambda x: x[:1], rows)

    @jax.jit
    def step(rows: Any, one: Any, lengths: jax.Array) -> Any:
        y, rows = layer.apply({**params, "cache": rows}, x, lengths=lengths, mutable="cache")
        want, one = layer.apply({**params, "cache": one}, x[:1, :3], mutable="cache")
        return y[0, :3], want[0], rows["cache"], one["cache"]

    for other in (12, 0, 3):
        y, want, rows, one = step(rows, one, np.array([3, other]))
        np.testing.assert_allclose(y, want, atol=1e-5)


def test_padding_does_not_lengthen_a_row_without_a_cache() -> None:
    """In nnx, and of an encoder's output."""
    x = np.random.default_rng(0).normal(size=(2, 12, 16)).astype(np.float32)
    layer = MultiHeadAttention(2, rotary=Rotary(scaling=NTK))
    block = DecoderBlock(MultiHeadAttention(2), 8, cross_attention=layer)
    params = random_variables(block, x, x)
    own = flax_mha.nnx.MultiHeadAttention(2, 16, rotary=layer.rotary, rngs=nnx.Rngs(0))
    graph, state = nnx.split(own)

    @jax.jit
    def run(state: Any, lengths: jax.Array) -> Any:
        plain, first = nnx.merge(graph, state), x[:1]
        padded = block.apply(params, first, first, memory_lengths=lengths[:1])
        pairs = (plain(x, lengths=lengths)[:1, :5], plain(first[:, :5]))
        return [pairs, (padded, block.apply(params, first, first[:, :5]))]

    for found, want in run(state, np.array([5, 12])):
        np.testing.assert_allclose(found, want, atol=1e-5)


CASES: dict[str, tuple[Scaling, float, Any, float]] = {
    "interpolation": (Interpolation(4.0), 1e4, lambda c, b: theta(c, b) / 4, 1.0),
    "ntk": (Ntk(8.0), 1e4, lambda c, b: theta(c, b * 8 ** (R / (R - 2))), 1.0),
    "proportional": (Proportional(0.3, 2.0), 1e4, lambda c, b: theta(c, b) / 2 * (c < 0.3 * R // 2),
                     1.0),
    "yarn": (Yarn(16.0, 4096), 1e4, lambda c, b: yarn(c, b, 16, 4096, 32, 1),
             0.1 * math.log(16) + 1),
    # The ramp ends beyond the last pair.
    "yarn of a low base": (Yarn(16.0, 4096), 500.0, lambda c, b: yarn(c, b, 16, 4096, 32, 1),
                           0.1 * math.log(16) + 1),
    "yarn's own": (Yarn(40.0, 1024, 16.0, 2.0, attention_factor=1.5), 5e5,
                   lambda c, b: yarn(c, b, 40, 1024, 16, 2), 1.5),
    "llama": (Llama3(8.0, 8192), 5e5, lambda c, b: llama(c, b, 8, 8192), 1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_scalings_match_formulas(name: str, interleaved: bool) -> None:
    scaling, base, formula, size = CASES[name]
    x = np.random.default_rng(0).normal(size=(3, 2, R)).astype(np.float32)
    at = np.array([0, 7, LONG])
    turned = jax.jit(Rotary(base, interleaved=interleaved, scaling=scaling))(x, at)
    expected = rotated(x, lambda t, c: at[t] * formula(c, base), interleaved)
    np.testing.assert_allclose(turned, size * expected, atol=1e-5 * size)


def test_yarn_ramp_without_truncation_begins_between_pairs() -> None:
    whole, exact = (Yarn(32.0, 4096, truncate=t)(R, 1.5e5)[0] for t in (True, False))
    assert (np.diff(exact) < 0).all()
    assert 1e-3 < np.abs(whole / exact - 1).max() < 1
    np.testing.assert_array_equal(whole[:8], exact[:8])
