"""Hidden tokens with NaN that are still queries, in kernels for TPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import dot_product_attention, masks

T, HIDDEN = 128, 100


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["splash", "short", "flex", "reference"])
def test_nan_queries_change_no_gradient_of_others(tpu: None, kernel: str) -> None:
    """The loss leaves out their outputs, as docs/guarantees.md assumes."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 1, T, 2, 16)), jnp.float32)
    real = (jnp.arange(T) < HIDDEN)[None, :, None, None]

    @jax.jit
    def pull(x: jax.Array) -> jax.Array:
        def loss(x: jax.Array) -> jax.Array:
            out = dot_product_attention(*x, mask=masks.Lengths(jnp.array([HIDDEN])), kernel=kernel)
            return (jnp.where(real, out, 0) ** 2).sum()

        return jnp.where(real, jax.grad(loss)(x), 0)

    np.testing.assert_allclose(pull(jnp.where(real, x, np.nan)), pull(x), rtol=1e-5, atol=1e-6)
    assert jnp.abs(pull(x)).sum() > 1
