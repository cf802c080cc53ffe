"""Score functions against their equations in NumPy, query by query and key by key."""

import functools
from collections.abc import Callable

import jax
import ml_dtypes
import numpy as np
import pytest

from flax_mha import MultiHeadAttention, dot_product_attention
from flax_mha.masks import Lengths
from flax_mha.scores import (
    Alibi,
    Bias,
    Relative,
    RelativeBias,
    Score,
    ScoreMod,
    SoftCap,
    TransformerXL,
)
from tests.scores import catalogue
from tests.scores.test_learned_scores import bucket_of

RNG = np.random.default_rng(0)
T, S, N, H = 9, 13, 6, 4
SCENE = catalogue.Scene((), T, S, N=N)
DISTANCE = np.arange(S) - np.arange(T)[:, None]
TABLE = RNG.normal(size=(N, 8)).astype(np.float32)
BIAS = RNG.normal(size=(N, T, S)).astype(ml_dtypes.bfloat16)
KEYS = RNG.normal(size=(2 * catalogue.REACH + 1, H)).astype(np.float32)
XL = {
    "content_bias": RNG.normal(size=(N, H)).astype(np.float32),
    "position_bias": RNG.normal(size=(N, H)).astype(np.float32),
    "kernel": RNG.normal(size=(6, N, H)).astype(np.float32),
}


def by_bucket(bidirectional: bool) -> np.ndarray:
    buckets = [[bucket_of(int(d), 8, bidirectional, 10) for d in row] for row in DISTANCE]
    return TABLE[:, np.array(buckets)]


@pytest.mark.parametrize(
    ("score", "rule"),
    [
        (SoftCap(1.5), lambda s, q, k: 1.5 * np.tanh(s / 1.5)),
        # The paper's slopes for 4 heads, and every second one for 8.
        (
            Alibi(),
            lambda s, q, k: s - 2.0 ** -np.c_[[2, 4, 6, 8, 1, 3]][..., None] * np.abs(DISTANCE),
        ),
        (Bias(BIAS), lambda s, q, k: s + BIAS.astype(float)),
        (RelativeBias(TABLE, max_distance=10), lambda s, q, k: s + by_bucket(True)),
        (RelativeBias(TABLE, False, 10), lambda s, q, k: s + by_bucket(False)),
        (Relative(KEYS), lambda s, q, k: catalogue.shaw(s, SCENE, q, k, KEYS)),
        (TransformerXL(**XL), lambda s, q, k: catalogue.transformer_xl(s, SCENE, q, k, **XL)),
    ],
    ids=["cap", "alibi", "bias", "buckets", "causal_buckets", "relative", "transformer_xl"],
)  # fmt: skip
def test_score_matches_its_equation(score: ScoreMod, rule: Callable[..., np.ndarray]) -> None:
    q, k, v = (RNG.normal(size=(length, N, H)).astype(np.float32) for length in (T, S, S))
    s = rule(np.einsum("tnh,snh->nts", q, k, dtype=float) / np.sqrt(H), q, k)
    weights = np.exp(s - s.max(-1, keepdims=True))
    expected = np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), v)
    out = jax.jit(lambda q, k, v: dot_product_attention(q, k, v, scores=(score,)))(q, k, v)
    np.testing.assert_allclose(out, expected, atol=3e-5)


@pytest.mark.parametrize("kernel", ["reference", "blockwise"])
def test_functions_do_not_see_scores_that_a_mask_hides(kernel: str) -> None:
    """The square of a hidden score would be infinite, and its gradient NaN."""
    q, k, v = (4 + RNG.normal(size=(T, N, H)).astype(np.float32) for _ in range(3))
    k[-1] = 3e38

    @jax.jit
    def gradients(*qkv: jax.Array) -> list[jax.Array]:
        square = Score(lambda s, row, head, i, j: s * s)
        call = functools.partial(dot_product_attention, scores=(square,), kernel=kernel)
        return jax.grad(lambda *x: call(*x, mask=Lengths(T - 1)).sum(), (0, 1, 2))(*qkv)

    assert all(np.isfinite(x).all() for x in gradients(q, k, v))


def test_each_score_has_parameters_of_its_own() -> None:
    layer = MultiHeadAttention(2, scores=(RelativeBias(), SoftCap(3.0), RelativeBias(buckets=8)))
    shapes = jax.eval_shape(layer.init, jax.random.key(0), np.zeros((1, 4, 8), np.float32))
    tables = {name: x.shape for name, x in shapes["params"].items() if "bias" in name}
    assert tables == {"relative_bias": (2, 32), "relative_bias_1": (2, 8)}
