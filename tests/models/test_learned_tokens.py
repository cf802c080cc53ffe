"""Learned tokens before those of the input, and pooling, in a `Classifier`."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import Classifier, Encoder, EncoderBlock, MultiHeadAttention
from tests.support.oracle import error, float64, random_like

B, T, D, CLASS = 2, 5, 8, 1
X = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
ENCODER = Encoder(1, EncoderBlock(MultiHeadAttention(2), 12))


class Same(nn.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def model(**fields: Any) -> Classifier:
    options: dict[str, Any] = {"class_tokens": CLASS, "register_tokens": 2}
    return Classifier(Same(), ENCODER, 3, **options | {"pooling": "first_and_mean"} | fields)


def expected(params: Any, lengths: np.ndarray) -> np.ndarray:
    """Compute the logits with positions for class tokens and inputs, and none for registers."""
    x = np.concatenate([np.broadcast_to(params["class_tokens"], (B, CLASS, D)), X], 1)
    x = x + params["positions"]["embedding"]
    registers = np.broadcast_to(params["register_tokens"], (B, 2, D))
    x = np.concatenate([x[:, :CLASS], registers, x[:, CLASS:]], 1).astype(np.float32)
    y = float64(ENCODER.apply({"params": params["encoder"]}, x, lengths=lengths + CLASS + 2))
    means = [row[CLASS + 2 :][:n].mean(0) for row, n in zip(y, lengths, strict=True)]
    pooled = np.concatenate([y[:, 0], means], -1)
    return pooled @ float64(params["head"]["kernel"]) + float64(params["head"]["bias"])


@pytest.mark.sampled(0.25, slow=0.2)
@pytest.mark.parametrize("lengths", [[T, T], [T, 3]])
def test_registers_and_pooling_match_formula(lengths: list[int]) -> None:
    """Tokens beyond the lengths reach neither logits nor gradients; all others do."""
    module, count = model(), np.array(lengths)
    params = random_like(jax.eval_shape(module.init, jax.random.key(0), X))
    assert params["params"]["register_tokens"].shape == (2, D)
    assert params["params"]["positions"]["embedding"].shape == (T + CLASS, D)
    call = {} if lengths == [T, T] else {"lengths": count}
    logits = jax.jit(module.apply)(params, X, **call)
    assert error(logits, expected(params["params"], count)) < 2e-6
    cotangent = np.random.default_rng(1).normal(size=logits.shape)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.vdot(module.apply(params, x, **call), cotangent)

    of_params, of_x = jax.jit(jax.grad(loss, (0, 1)))(params, X)
    real = np.arange(T) < count[:, None]
    np.testing.assert_array_equal(np.abs(of_x).max(-1) > 0, real)
    assert np.abs(of_params["params"]["register_tokens"]).min(-1).all()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pooling": "both"}, r"pooling must be one of \['first', 'first_and_mean', 'mean'\]"),
    ],
)
def test_invalid_tokens_and_poolings_raise(fields: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        jax.eval_shape(model(**fields).init, jax.random.key(0), X)
