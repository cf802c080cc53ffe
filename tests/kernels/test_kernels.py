"""Further promises of every kernel's calls: scale, weights, user-defined scores, the choice."""

import functools
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


@functools.cache
def arrays(dtype: str = "float32") -> list[jax.Array]:
    """Return q, k, v and a cotangent."""
    rng = np.random.default_rng(1)
    sizes = [(T, N, H), (S, K, H), (S, K, H), (T, N, H)]
    return [jnp.asarray(rng.normal(size=(B, *size)), dtype) for size in sizes]


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("kernel", KERNELS)
def test_arguments_of_a_mask_have_no_gradient(kernel: str) -> None:
    """A floating-point argument has the gradient 0, and the other gradients do not change."""
    q, k, v, _ = arrays()

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


def test_decoding_reads_each_key_once(small_blocks: None) -> None:
    """The last of several blocks of keys overlaps the one before it."""
    q, k, v = (np.asarray(x, float)[0] for x in arrays()[:3])
    q, k, v = q[:1], k[:7], v[:7]
    s = np.einsum("tkgh,skh->kgts", q.reshape(1, K, N // K, H), k) / np.sqrt(H)
    p = np.exp(s)
    expected = np.einsum("kgts,skh->tkgh", p / p.sum(-1, keepdims=True), v).reshape(1, N, H)
    out = jax.jit(lambda *qkv: dot_product_attention(*qkv, kernel="decode"))(
        *(x.astype(np.float32) for x in (q, k, v))
    )
    np.testing.assert_allclose(out, expected, atol=1e-6)
