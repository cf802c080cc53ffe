"""A check of one kernel call against the float64 oracle, for kernels with their own tests.

As in the contract, an error is at most twice the error of plain attention in the same dtype.
"""

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha import dot_product_attention
from flax_mha.base.coordinates import whole
from flax_mha.base.shapes import Dims
from tests.kernels.contract import FLOOR, GRADIENTS
from tests.support import oracle, plain_attention

B, N, H, HV = 2, 4, 8, 5


def arrays(t: int, s: int, K: int, dtype: str = "float32") -> list[jax.Array]:
    rng = np.random.default_rng(1)
    sizes = [(t, N, H), (s, K, H), (s, K, HV), (t, N, HV)]
    return [jnp.asarray(rng.normal(size=(B, *size)), dtype) for size in sizes]


def table(mask, t: int, s: int, q_positions=None, kv_positions=None) -> np.ndarray | None:
    """Return the pairs that a mask allows. A number means that positions count from it."""
    if mask is None:
        return None
    q, k = (
        np.arange(length) + (x or 0) if x is None or isinstance(x, int) else x
        for x, length in ((q_positions, t), (kv_positions, s))
    )
    dims = Dims((B,), t, s, N, N, H, HV)
    return np.asarray(mask.bind(dims).allowed(whole(dims, q, k)))


def check(
    kernel: str, operands: list[jax.Array], known: dict, call, learned: dict, has_lse: bool = True
) -> None:  # fmt: skip
    """Check outputs, lse and all gradients of call(learned) against the oracle."""
    *qkv, cotangent = operands

    dlse = np.random.default_rng(3).normal(size=(B, N, len(cotangent[0]))).astype("f4")

    @jax.jit
    def run(qkv, learned):
        def attend(qkv, learned):
            return dot_product_attention(
                *qkv, kernel=kernel, return_residuals=has_lse, **call(learned)
            )

        results, pull = jax.vjp(attend, qkv, learned)
        return results, *pull((cotangent, jnp.asarray(dlse)) if has_lse else cotangent)

    results, gradients, learned_gradients = run(qkv, learned)
    out, lse = results if has_lse else (results, None)
    expected, expected_lse, _ = oracle.attention(*qkv, **known)
    cotangents = {"cotangent": cotangent, "lse_cotangent": dlse if has_lse else None}
    exact = oracle.attention_gradients(*qkv, **cotangents, **known)
    # cuDNN reads its rounded output for the mean of the weights' gradients.
    means = ("weights", "rounded out") if kernel == "cudnn" else ("weights",)
    (rounded, _, rounded_gradients), *others = (
        plain_attention.attention(*qkv, mean_of=mean, **cotangents, **known) for mean in means
    )
    assert oracle.error(out, expected) <= max(FLOOR, 2 * oracle.error(rounded, expected))
    if has_lse:
        seen = np.isfinite(expected_lse)
        np.testing.assert_array_equal(np.isneginf(lse), ~seen)
        np.testing.assert_allclose(lse[seen], expected_lse[seen], atol=2e-5)
    actual = dict(zip("qkv", gradients, strict=True)) | learned_gradients
    for name, got in actual.items():
        want, allowed = getattr(exact, name), GRADIENTS[out.dtype.name]
        for plain in (rounded_gradients, *(gradients for _, _, gradients in others)):
            yardstick = getattr(plain, name)
            if name == "bias":
                yardstick = oracle.summed_to(yardstick, np.shape(want))
            allowed = max(allowed, 2 * oracle.error(yardstick, want))
        assert oracle.error(got, want) <= allowed, name
