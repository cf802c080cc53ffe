"""Further promises of every kernel's calls: scale, weights, user-defined scores, the choice."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import dot_product_attention, explain, kernels
from flax_mha.masks import Causal, Predicate, Window
from tests.kernels.cases import KERNELS

B, T, S, N, K, H = 2, 140, 150, 4, 2, 8


def arrays() -> list[jax.Array]:
    """Return q, k and v."""
    rng, sizes = np.random.default_rng(1), [(T, N, H), (S, K, H), (S, K, H)]
    return [jnp.asarray(rng.normal(size=(B, *size)), jnp.float32) for size in sizes]


@pytest.mark.sampled(0.15)
@pytest.mark.parametrize("kernel", KERNELS)
def test_arguments_of_a_mask_have_no_gradient(kernel: str) -> None:
    """A floating-point argument has the gradient 0, and the other gradients do not change."""
    q, k, v = arrays()

    def call(q: jax.Array, reach: Any) -> jax.Array:
        mask = Predicate(lambda b, n, i, j, m: (i - j).astype(m.dtype) <= m, (reach,))
        return dot_product_attention(q, k, v, mask=mask, kernel=kernel).sum()

    dq, dreach = jax.jit(jax.grad(call, (0, 1)))(q, jnp.float32(2.5))
    assert dreach == 0
    np.testing.assert_array_equal(dq, jax.jit(jax.grad(call))(q, jnp.int32(2)))


def test_explain_runs_nothing_and_tells_the_choice() -> None:
    shape = jax.ShapeDtypeStruct((2, 10**6, 4, 64), jnp.bfloat16)
    explanation = explain(shape, shape, shape, mask=Causal())
    assert explanation.chosen in KERNELS
    assert [line.split()[0] for line in str(explanation).splitlines()] == list(kernels.KERNELS)
    assert "chosen" in str(explanation)


def test_compiler_does_not_compute_static_masks(optimized: None) -> None:
    """The gradient's program holds no table of the mask, which takes XLA seconds to compute."""
    q = jnp.ones((1, 96, 1, 8))

    def loss(q: jax.Array) -> jax.Array:
        mask = Causal() & Window(9)
        return dot_product_attention(q, q, q, mask=mask, kernel="reference").sum()

    text = jax.jit(jax.grad(loss)).lower(q).compile().as_text()
    assert not re.findall(r"\[[\d,]*96,96\]\S* constant", text)


def test_decoding_reads_the_last_key(small_blocks: None) -> None:
    """The last of several blocks of keys overlaps the one before it."""
    q, k, v = (x[:1, :7] for x in arrays())

    @jax.jit
    def decode(*qkv: jax.Array) -> jax.Array:
        mask = Window(0, 0)
        return dot_product_attention(*qkv, mask=mask, q_positions=6, kernel="decode")

    expected = np.repeat(v[:, 6:], N // K, -2)
    np.testing.assert_allclose(decode(q[:, :1], k, v), expected, atol=1e-6)
