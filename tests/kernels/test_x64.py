"""Narrow arrays under `jax_enable_x64`, where Python floats and sums of ints are 64 bits wide."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import dot_product_attention, explain
from flax_mha.masks import Causal
from tests.kernels.cases import KERNELS
from tests.support import oracle


@pytest.mark.sampled(0.15)
@pytest.mark.parametrize("kernel", KERNELS)
def test_results_of_float64_are_as_exact(kernel: str) -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        q, k, v, dout = (jnp.asarray(rng.normal(size=(1, 5, n, 4))) for n in (2, 1, 1, 2))

        def attend(*qkv: jax.Array) -> jax.Array:
            return dot_product_attention(*qkv, mask=Causal(), kernel=kernel)

        out, pull = jax.vjp(jax.jit(attend), q, k, v)
        known = {"allowed": np.tri(5, dtype=bool)}
        exact = oracle.attention_gradients(q, k, v, cotangent=dout, **known)
        assert oracle.error(out, oracle.attention(q, k, v, **known)[0]) < 1e-12
        for got, want in zip(pull(dout), exact, strict=False):
            assert got.dtype == jnp.float64
            assert oracle.error(got, want) < 1e-12


def test_splash_refuses_64_bits(tpu: None) -> None:
    """JAX's kernel mixes integers of 32 and 64 bits there (JAX 0.12.0.1)."""
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.float32)
    assert "splash" not in explain(x, x, x).refused
    with jax.enable_x64(True):
        assert "jax_enable_x64" in explain(x, x, x).refused["splash"]
