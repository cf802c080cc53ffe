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


def check(operands: list[jax.Array], known: dict, call: dict, learned: dict) -> None:
    """Check outputs, lse and all gradients of a call of cuDNN against the oracle."""
    *qkv, cotangent = operands
    dlse = np.random.default_rng(3).normal(size=(B, N, len(cotangent[0]))).astype("f4")

    @jax.jit
    def run(qkv, learned):
        def attend(qkv, learned):
            call_of = {"kernel": "cudnn", "return_residuals": True} | call | learned
            return dot_product_attention(*qkv, **call_of)

        results, pull = jax.vjp(attend, qkv, learned)
        return results, *pull((cotangent, jnp.asarray(dlse)))

    (out, lse), gradients, learned_gradients = run(qkv, learned)
    expected, expected_lse, _ = oracle.attention(*qkv, **known)
    cotangents = {"cotangent": cotangent, "lse_cotangent": dlse}
    exact = oracle.attention_gradients(*qkv, **cotangents, **known)
    # cuDNN reads its rounded output for the mean of the weights' gradients.
    plain = [
        plain_attention.attention(*qkv, mean_of=mean, **cotangents, **known)
        for mean in ("weights", "rounded out")
    ]
    assert oracle.error(out, expected) <= max(FLOOR, 2 * oracle.error(plain[0][0], expected))
    seen = np.isfinite(expected_lse)
    np.testing.assert_array_equal(np.isneginf(lse), ~seen)
    np.testing.assert_allclose(lse[seen], expected_lse[seen], atol=2e-5)
    actual = dict(zip("qkv", gradients, strict=True)) | learned_gradients
    for name, got in actual.items():
        want, allowed = getattr(exact, name), GRADIENTS[out.dtype.name]
        for _, _, rounded in plain:
            yardstick = getattr(rounded, name)
            if name == "bias":
                yardstick = oracle.summed_to(yardstick, np.shape(want))
            allowed = max(allowed, 2 * oracle.error(yardstick, want))
        assert oracle.error(got, want) <= allowed, name
