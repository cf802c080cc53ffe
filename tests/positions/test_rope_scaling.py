"""Scalings of rotary embeddings, against their formulas pair by pair."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_mha.nnx
from flax_mha import DecoderBlock, MultiHeadAttention, masks, variants
from flax_mha.positions import (
    DynamicNtk,
    Interpolation,
    Llama3,
    LongRope,
    Ntk,
    Proportional,
    Rotary,
    Yarn,
    rotary,
)
from flax_mha.positions.rope_scaling import Scaling
from tests.support.decoding import decoded

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
    got = rotary(x, positions, base=100.0, scaling=scaling)
    for i, row in enumerate(positions):
        at = row[:, None] * np.array([angle(c, row.max() + 1) for c in range(4)])
        a, b = np.split(x[i, :, 0].astype(np.float64), 2, -1)
        size = getattr(scaling, "attention_factor", 1.0)
        want = np.concatenate(
            [a * np.cos(at) - b * np.sin(at), b * np.cos(at) + a * np.sin(at)], -1
        )
        np.testing.assert_allclose(got[i, :, 0], size * want, atol=1e-5)


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


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("name", LAYERS)
def test_a_padded_row_is_rotated_as_if_alone(name: str) -> None:
    """A prompt, a call with padding, a token; a call in nnx; and an encoder's output."""
    x, layer = jax.random.normal(jax.random.key(0), (2, 12, 16)), LAYERS[name]
    rows, one = (layer.init(jax.random.key(1), jnp.zeros((n, 24, 16))) for n in (2, 1))
    for n, other in ((5, 12), (2, 0), (1, 1)):
        y, new = layer.apply(rows, x, lengths=jnp.array([n, other]), mutable="cache")
        want, kept = layer.apply(one, x[:1, :n], mutable="cache")
        np.testing.assert_allclose(y[0, :n], want[0], atol=1e-5)
        rows, one = rows | new, one | kept
    plain = flax_mha.nnx.MultiHeadAttention(2, 16, rotary=layer.rotary, rngs=nnx.Rngs(0))
    y = plain(x, lengths=jnp.array([5, 12]))[:1, :5]
    np.testing.assert_allclose(y, plain(x[:1, :5]), atol=1e-5)
    cross = MultiHeadAttention(2, rotary=layer.rotary)
    block = DecoderBlock(MultiHeadAttention(2), 8, cross_attention=cross)
    v = block.init(jax.random.key(2), x, x)
    y = block.apply(v, x[:1], x[:1], memory_lengths=jnp.array([5]))
    np.testing.assert_allclose(y, block.apply(v, x[:1], x[:1, :5]), atol=1e-5)


CASES: dict[str, tuple[Scaling, float, Any, float]] = {
    "interpolation": (Interpolation(4.0), 1e4, lambda c, b: theta(c, b) / 4, 1.0),
    "ntk": (Ntk(8.0), 1e4, lambda c, b: theta(c, b * 8 ** (R / (R - 2))), 1.0),
    "proportional": (Proportional(0.3, 2.0), 1e4, lambda c, b: theta(c, b) / 2 * (c < 0.3 * R // 2),
                     1.0),
    "yarn": (Yarn(16.0, 4096), 1e4, lambda c, b: yarn(c, b, 16, 4096, 32, 1),
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
    turned = Rotary(base, interleaved=interleaved, scaling=scaling)(x, jnp.asarray(at))
    angle = at[:, None] * np.array([formula(c, base) for c in range(R // 2)])
    first = np.s_[..., ::2] if interleaved else np.s_[..., : R // 2]
    second = np.s_[..., 1::2] if interleaved else np.s_[..., R // 2 :]
    pairs = x[first] + 1j * x[second]
    expected = size * pairs * np.exp(1j * angle)[:, None]
    np.testing.assert_allclose(turned[first], expected.real, atol=1e-5 * size)
    np.testing.assert_allclose(turned[second], expected.imag, atol=1e-5 * size)


def test_factor_of_1_changes_nothing() -> None:
    x = np.random.default_rng(0).normal(size=(5, 2, R)).astype(np.float32)
    plain = rotary(x, jnp.arange(5))
    for scaling in (Interpolation(1.0), Ntk(1.0), Yarn(1.0, 64), Llama3(1.0, 64)):
        np.testing.assert_allclose(rotary(x, jnp.arange(5), scaling=scaling), plain, atol=1e-6)


def test_yarn_ramp_without_truncation_begins_between_pairs() -> None:
    whole, exact = (Yarn(32.0, 4096, truncate=t)(R, 1.5e5)[0] for t in (True, False))
    assert (np.diff(exact) < 0).all()
    assert 1e-3 < np.abs(whole / exact - 1).max() < 1
    np.testing.assert_array_equal(whole[:8], exact[:8])


@pytest.mark.sampled(0.13, slow=0.2)
def test_scaled_rotary_layer_decodes_like_full_forward() -> None:
    layer = MultiHeadAttention(
        2, mask=masks.Causal(), rotary=Rotary(5e5, scaling=Llama3(8.0, 16)), decode=True
    )
    whole = layer.clone(decode=False)
    x = jax.random.normal(jax.random.key(0), (2, 6, 16))
    params = jax.jit(whole.init)(jax.random.key(1), x)
    expected = jax.jit(whole.apply)(params, x)
    np.testing.assert_allclose(decoded(layer, params, x), expected, atol=1e-5)
    plain = layer.clone(decode=False, rotary=Rotary(5e5))
    assert np.abs(jax.jit(plain.apply)(params, x) - expected).max() > 1e-3
