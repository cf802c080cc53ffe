"""Calls of kernels in half precision, and the comparison of two results."""

import numpy as np

from flax_mha import dot_product_attention
from tests.support import oracle


def run(q, k, v, kernel: str = "cudnn", **call):
    return dot_product_attention(q, k, v, kernel=kernel, return_residuals=True, **call)


def close(got, want, bound: float = 3e-2) -> None:
    """Check that got equals want where it is not finite, and is near elsewhere."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    seen = np.isfinite(want)
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    np.testing.assert_array_equal(np.isfinite(got), seen)
    assert oracle.error(got[seen], want[seen]) < bound
