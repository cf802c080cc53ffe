"""A `Classifier` of learned tokens, positions and pooling, against its formula in float64."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

from flax_mha import Classifier, Encoder, EncoderBlock, MultiHeadAttention
from tests.models.test_blocks import differentiate
from tests.support import oracle
from tests.support.arrays import random_variables
from tests.support.oracle import error, float64

T, D = 5, 8
X = np.random.default_rng(0).normal(size=(3, T, D)).astype(np.float32)
LENGTHS = np.array([T, 3, 0])
LEARNED = {"class_tokens": 1, "register_tokens": 2}
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "learned": {"positions": "learned"}, "sinusoidal": {"positions": "sinusoidal"},
    "none": {"positions": "none"}, "first": {"pooling": "first"} | LEARNED,
    "first and mean": {"pooling": "first_and_mean"} | LEARNED,
}  # fmt: skip


class Same(nn.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def model(**fields: Any) -> Classifier:
    return Classifier(Same(), Encoder(1, EncoderBlock(MultiHeadAttention(2), 12)), 3, **fields)


def expected(params: Any, fields: dict[str, Any]) -> np.ndarray:
    """Compute the logits. Class tokens and inputs have positions, and registers have none."""
    learned = [
        np.broadcast_to(float64(params.get(name, np.zeros((0, D)))), (3, fields.get(name, 0), D))
        for name in LEARNED
    ]
    x = np.concatenate([learned[0], X], 1)
    if fields.get("positions") != "none":
        table = params.get("positions", {}).get("embedding")
        x = x + (oracle.sinusoidal(np.arange(T), D) if table is None else float64(table))
    first = fields.get("class_tokens", 0)
    x = np.concatenate([x[:, :first], learned[1], x[:, first:]], 1)
    before = x.shape[1] - T
    allowed = (np.arange(x.shape[1]) < LENGTHS[:, None] + before)[:, None, None]
    x = oracle.encoder_block(params["encoder"]["layers_0"], x, allowed=allowed)
    x = oracle.layer_norm(params["encoder"]["norm"], x)
    means = [row[before:][:n].sum(0) / max(n, 1) for row, n in zip(x, LENGTHS, strict=True)]
    pooled = {
        "mean": np.stack(means), "first": x[:, 0],
        "first_and_mean": np.concatenate([x[:, 0], means], -1),
    }  # fmt: skip
    return oracle.project(params["head"], pooled[fields.get("pooling", "mean")])


@pytest.mark.sampled(0.12)
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifier_matches_formula(name: str) -> None:
    """Padding reaches neither logits nor gradients, whatever it holds. All other tokens do."""
    module = model(**CLASSIFIERS[name])
    params = random_variables(module, X)
    real = np.arange(T) < LENGTHS[:, None]
    x = np.where(real[..., None], X, np.nan)
    logits, (of_params, of_x) = differentiate(module, params, x, lengths=LENGTHS)
    assert error(logits, expected(params["params"], CLASSIFIERS[name])) < 5e-6
    np.testing.assert_array_equal(np.abs(of_x).max(-1) > 0, real)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(of_params))
    for learned in LEARNED.keys() & CLASSIFIERS[name].keys():
        assert np.abs(of_params["params"][learned]).min(-1).all()
