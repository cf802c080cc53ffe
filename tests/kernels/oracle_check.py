"""Holds one call of one kernel against the float64 oracle, for kernels with tests of their own."""

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha import dot_product_attention
from flax_mha.grid import whole
from flax_mha.shapes import Dims
from tests import oracle

B, N, H, HV = 2, 4, 8, 5
# Forward and gradients, relative to the norm. Half precision: the inputs' rounding, passed on.
TOLERANCE = {"float32": (2e-6, 1e-5), "bfloat16": (1e-2, 3e-2), "float16": (1.5e-3, 4e-3)}


def arrays(t: int, s: int, K: int, dtype: str = "float32") -> list[jax.Array]:
    rng = np.random.default_rng(1)
    sizes = [(t, N, H), (s, K, H), (s, K, HV), (t, N, HV)]
    return [jnp.asarray(rng.normal(size=(B, *size)), dtype) for size in sizes]


def table(mask, t: int, s: int) -> np.ndarray | None:
    dims = Dims((B,), t, s, N, N, H, HV)
    return None if mask is None else np.asarray(mask.bind(dims).allowed(whole(dims)))


def check(kernel: str, operands: list[jax.Array], known: dict, call, learned: dict) -> None:
    """Holds outputs, lse and all gradients of call(learned) against the oracle's."""
    *qkv, cotangent = operands

    @jax.jit
    def run(qkv, learned):
        out, pull, lse = jax.vjp(
            lambda qkv, learned: dot_product_attention(
                *qkv, kernel=kernel, return_residuals=True, **call(learned)
            ),
            qkv, learned, has_aux=True,
        )  # fmt: skip
        return out, lse, *pull(cotangent)

    out, lse, gradients, learned_gradients = run(qkv, learned)
    expected, expected_lse, _ = oracle.attention(*qkv, **known)
    exact = oracle.attention_gradients(*qkv, cotangent=cotangent, **known)
    forward, backward = TOLERANCE[out.dtype.name]
    assert oracle.error(out, expected) < forward
    seen = np.isfinite(expected_lse)
    np.testing.assert_array_equal(np.isneginf(lse), ~seen)
    np.testing.assert_allclose(lse[seen], expected_lse[seen], atol=2e-5)
    for got, want in zip(gradients, exact, strict=False):
        assert oracle.error(got, want) < backward
    for name, got in learned_gradients.items():
        assert oracle.error(got, getattr(exact, name)) < backward
