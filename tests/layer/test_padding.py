"""The contents of padding reach neither outputs nor gradients, of inputs or parameters."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import (
    Decoder,
    DecoderBlock,
    Encoder,
    EncoderBlock,
    LanguageModel,
    MultiHeadAttention,
    QKNorm,
    masks,
)
from flax_mha.models.embeddings import TokenEmbedding
from flax_mha.positions import Rotary
from tests.support.oracle import random_like

KEY = jax.random.key(0)
B, T, S, D = 2, 6, 5, 8
LENGTHS, MEMORY = np.array([4, 6]), np.array([5, 2])
ORDER = np.array([3, 1, 0, 5, 4, 2])
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(B, T, D)), RNG.normal(size=(B, S, D))
REAL, SEEN = np.arange(T) < LENGTHS[:, None], np.arange(S) < MEMORY[:, None]

LAYER = MultiHeadAttention(2, num_kv_heads=1)
PLAIN = MultiHeadAttention(2, head_dim=4)
NORMED = LAYER.clone(rotary=Rotary(100.0), mask=masks.Causal(), qk_norm=QKNorm(), gate="head")
CROSS = DecoderBlock(LAYER, 16, cross_attention=PLAIN)
BLOCK = EncoderBlock(LAYER, 16)
MEMORIES = {"memory_lengths": MEMORY}
# The module, its inputs, the bools of their real tokens, and further arguments.
MODULES: dict[str, tuple[nn.Module, tuple, tuple, dict[str, Any]]] = {
    "self": (LAYER, (X,), (REAL,), {}),
    "ordered": (LAYER, (X,), (LENGTHS[:, None] > ORDER,), {"order": ORDER}),
    "cross": (PLAIN, (X, Y), (REAL, np.ones_like(SEEN)), {"mask": masks.Lengths(MEMORY)}),
    "post": (BLOCK.clone(pre_norm=False), (X,), (REAL,), {}),
    "decoder block": (CROSS, (X, Y), (REAL, SEEN), MEMORIES),
    "norms and gates under scan": (
        Encoder(2, EncoderBlock(NORMED, 16, remat=True), scan=True), (X,), (REAL,), {},
    ),
    "language model": (
        LanguageModel(TokenEmbedding(7, D), Decoder(2, CROSS, scan=True)),
        (np.arange(B * T).reshape(B, T) % 7, Y), (REAL, SEEN), MEMORIES,
    ),
}  # fmt: skip


def filled(x: np.ndarray, real: np.ndarray, padding: float, dtype: str) -> np.ndarray:
    """Return the input with this value in its padding. Token ids beyond the table if they are
    ints.
    """
    if np.issubdtype(x.dtype, np.integer):
        return np.where(real, x, 0 if padding == 0 else 10**6)
    real = real if real.ndim == x.ndim else real[..., None]
    return np.where(real, x, padding).astype(dtype)


# In bfloat16 those that the others are part of.
HALF = ("ordered", "norms and gates under scan", "language model")
CALLS = [(name, "float32") for name in MODULES] + [(name, "bfloat16") for name in HALF]


# Flax's norms promote bfloat16 silently.
@jax.numpy_dtype_promotion("standard")
@pytest.mark.sampled(0.072)
@pytest.mark.parametrize(("name", "dtype"), CALLS)
def test_padding_reaches_no_output_or_gradient(name: str, dtype: str) -> None:
    module, inputs, real, call = MODULES[name]
    call = {**call, "lengths": LENGTHS}

    def with_padding(padding: float) -> list[np.ndarray]:
        return [filled(x, some, padding, dtype) for x, some in zip(inputs, real, strict=True)]

    clean = with_padding(0)
    params = random_like(jax.eval_shape(functools.partial(module.init, **call), KEY, *clean))
    floats = [n for n, x in enumerate(inputs) if np.issubdtype(x.dtype, np.floating)]

    @jax.jit
    def run(*inputs: jax.Array) -> Any:
        def loss(params: Any, own: list[jax.Array]) -> Any:
            given = list(inputs)
            for n, x in zip(floats, own, strict=True):
                given[n] = x
            # Sum over real tokens only.
            out = jnp.where(real[0][..., None], module.apply(params, *given, **call), 0)
            return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

        pull = jax.value_and_grad(loss, (0, 1), has_aux=True)
        return pull(params, [inputs[n] for n in floats])

    want = run(*clean)
    for padding in (-np.inf, np.nan, 1e20):
        got = run(*with_padding(padding))
        for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_array_equal(a, b)
    assert all(np.abs(x).sum() > 0 for x in jax.tree.leaves(want[1][1]))
