"""Functions rewritten into operations that TPU kernels have give the same results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha.kernels.flex.function import trace
from flax_mha.kernels.flex.operand import flat
from flax_mha.kernels.flex.tpu import mosaic

T, S, N = 4, 6, 3
KNOWN = np.array([0.5, -1.0, 2.0, 4.0], np.float32)
# Functions of a score, a head, positions, a table [N, 8] and numbers [N].
FUNCTIONS = {
    "by head": lambda s, n, i, j, t, x: s * x[n],
    "by head and distance": lambda s, n, i, j, t, x: s + t[n, jnp.clip(j - i, 0, 7)],
    "a head's row": lambda s, n, i, j, t, x: (
        s + jnp.take(jax.lax.dynamic_index_in_dim(t, n.reshape(()), keepdims=False), jnp.abs(j - i))
    ),
    "by query": lambda s, n, i, j, t, x: s + jnp.take(x, i, mode="clip"),
    "outside": lambda s, n, i, j, t, x: s + jnp.take(x, j, mode="fill", fill_value=7.0),
    "known": lambda s, n, i, j, t, x: s * KNOWN[1] + jnp.asarray(KNOWN)[n] + x[0] + t[2, 3],
    "a column": lambda s, n, i, j, t, x: s + t[:, 3][n],
    "branches": lambda s, n, i, j, t, x: jax.lax.switch(
        n.reshape(()), [lambda: s, lambda: 2 * s, lambda: s + i]
    ),
    "computed again": lambda s, n, i, j, t, x: jax.checkpoint(jnp.tanh)(s) * x[1],
    "derivatives of its own": lambda s, n, i, j, t, x: jax.nn.relu(s) + jax.nn.silu(s) * x[1],
}


@pytest.mark.sampled(0.15)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rewritten_functions_match_in_value_and_gradient(name: str) -> None:
    fn, rng = FUNCTIONS[name], np.random.default_rng(0)
    s, t, x = (jnp.asarray(rng.normal(size=n), jnp.float32) for n in ((T, S), (N, 8), (N,)))
    positions = jnp.array([[1]]), jnp.arange(T)[:, None], jnp.arange(S)[None]
    with jax.numpy_dtype_promotion("standard"):
        function, consts = trace(fn, s, *positions, t, x)
        assert mosaic.missing_operation(function) is None

        def lowered(s, t, x):
            args = [y.reshape(flat(y.shape)) for y in (*consts, s, *positions, t, x)]
            return mosaic.call(function, *args)

        @jax.jit
        def both(*args):
            results = []
            for call in (lowered, lambda s, t, x: fn(s, *positions, t, x)):
                out, pull = jax.vjp(call, *args)
                results.append((out, *pull(jnp.cos(s))))
            return results

        for a, b in zip(*both(s, t, x), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
