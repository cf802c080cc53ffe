"""Scalings of rotary embeddings, against their formulas pair by pair."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_mha.nnx
from flax_mha import (
    Decoder,
    DecoderBlock,
    Encoder,
    EncoderBlock,
    LanguageModel,
    MultiHeadAttention,
    Translator,
    generate,
    masks,
    models,
    variants,
)
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
    with pytest.raises(ValueError, match=r"short and long must have R/2=4 numbers.*got 3 and 4"):
        check_rows(LongRope(short[:3], long, 7), ROWS, angle)


LAYERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ntk": (MultiHeadAttention, {"rotary": Rotary(scaling=DynamicNtk(4.0, 8))}),
    "long": (MultiHeadAttention, {"rotary": Rotary(scaling=LongRope((1.0,) * 4, (4.0,) * 4, 8))}),
    "latent": (variants.MultiHeadLatentAttention, {"rotary": Rotary(scaling=DynamicNtk(4.0, 8)),
                                                   "rope_dim": 8, "kv_rank": 4}),
}  # fmt: skip


@pytest.mark.sampled(0.34)
@pytest.mark.parametrize("name", LAYERS)
def test_a_padded_row_is_rotated_as_if_alone(name: str) -> None:
    """A call, a prompt and its next calls, with caches of linen and nnx, and a jitted gradient."""
    cls, fields = LAYERS[name]
    x, n = np.random.default_rng(0).normal(size=(2, 12, 16)).astype(np.float32), jnp.array([5, 12])
    layer = cls(2, mask=masks.Causal(), **fields)
    v = layer.init(jax.random.key(1), x)
    graded = jax.jit(jax.value_and_grad(lambda x, n: layer.apply(v, x, lengths=n)[0, :5].sum()))
    for got, want in zip(graded(x, n), graded(x[:1, :5], n[:1]), strict=True):
        np.testing.assert_allclose(got[:1, :5] if got.ndim else got, want, atol=1e-5)
    in_nnx = getattr(flax_mha.nnx, cls.__name__)(2, 16, rngs=nnx.Rngs(0), **fields)

    def outputs(x: np.ndarray, *lengths: Any) -> list[jax.Array]:
        """Return the first row's outputs of three calls, by linen and by nnx."""
        cached, found = layer.clone(decode=True, mask=None), []
        held = cached.init(jax.random.key(0), jnp.zeros((len(x), 24, 16)))
        in_nnx.init_cache((len(x), 24, 16))
        for n in lengths:
            part = x[:, : n if isinstance(n, int) else 12]
            call = {} if isinstance(n, int) else {"lengths": n}
            y, new = cached.apply({**held, **v}, part, **call, mutable="cache")
            held, y = {**held, **new}, jnp.stack([y, in_nnx(part, decode=True, **call)])
            found.append(y[:, 0])
        return found

    padded = outputs(x, n, n - jnp.array([3, 12]), 1)
    for y, want in zip(padded, outputs(x[:1], 5, 2, 1), strict=True):
        np.testing.assert_allclose(y[:, : want.shape[1]], want, atol=1e-5)


@pytest.mark.sampled(0.5)
@pytest.mark.parametrize("scan", [False, True])
def test_padded_sources_and_prompts_generate_as_if_alone(scan: bool) -> None:
    layer = MultiHeadAttention(2, **LAYERS["ntk"][1])
    block = DecoderBlock(layer, 8, cross_attention=layer.copy())
    table = models.TokenEmbedding(30, 16)
    model = Translator(
        Encoder(1, EncoderBlock(layer, 8)), LanguageModel(table, Decoder(2, block, scan=scan))
    )
    plain = LanguageModel(table, Decoder(2, DecoderBlock(layer, 8), scan=scan))
    tokens, n = np.random.default_rng(0).integers(1, 30, (2, 12)), np.array([5, 12])
    for each, start in ((model, {"start": 1}), (plain, {})):
        v = each.init(jax.random.key(0), *[tokens] * (1 + len(start)))
        found, alone = (
            generate(each, v, *call, max_new_tokens=6, lengths=lengths, **start)
            for *call, lengths in ((tokens, n), (tokens[:1, :5], None))
        )
        np.testing.assert_allclose(found.scores[0], alone.scores[0], atol=1e-5)


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


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Interpolation(0.0), ValueError, r"Interpolation.factor must be above 0, got 0.0"),
        (lambda: Ntk("8"), TypeError, r"Ntk.factor must be a number, got '8'"),
        (lambda: Proportional(1.5), ValueError, r"Proportional.share must be at most 1, got 1.5"),
        (lambda: Proportional(0.0), ValueError, r"Proportional.share must be above 0, got 0.0"),
        (lambda: Yarn(8.0, 0), ValueError, r"Yarn.original_length must be at least 1, got 0"),
        (lambda: Yarn(8.0, 64, beta_slow=-1.0), ValueError, r"Yarn.beta_slow must be above 0"),
        (lambda: Llama3(8.0, 64, low=4.0), ValueError, r"low must be below high, got 4.0 and 4.0"),
        (lambda: rotary(jnp.ones((3, 1, 4)), jnp.arange(3), scaling=8.0), TypeError,
         r"scaling must be of flax_mha.positions, got 8.0 of float; give Llama3\("),
    ],
)  # fmt: skip
def test_invalid_scalings_raise(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
