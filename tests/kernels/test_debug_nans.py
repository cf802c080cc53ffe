"""Kernels under JAX's checks for infinities and NaN in every computation."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import dot_product_attention
from flax_mha.masks import Causal, Dense, Lengths, Mask, Window

T, N, H = 20, 2, 4
# Some blocks are partial, and some masks hide all of their padding.
MASKS: dict[str, Mask] = {
    "causal": Causal() & Window(5, 0),
    "lengths": Lengths(np.array([T, 3])),
    "dense": Dense(np.arange(T) != 4),
}


@pytest.fixture
def suspicious() -> Iterator[None]:
    jax.config.update("jax_debug_infs", True)
    jax.config.update("jax_debug_nans", True)
    yield
    jax.config.update("jax_debug_infs", False)
    jax.config.update("jax_debug_nans", False)


def attended(kernel: str, mask: Mask, jit: bool) -> Any:
    rng = np.random.default_rng(0)
    q, k, v, dout = (jnp.asarray(rng.normal(size=(2, T, N, H)), jnp.float32) for _ in range(4))

    def run(q: Any, k: Any, v: Any) -> Any:
        def attend(*qkv: Any) -> Any:
            return dot_product_attention(
                *qkv, mask=mask, kernel=kernel, sinks=jnp.zeros(N), return_weights=True
            )[0]

        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    return (jax.jit(run) if jit else run)(q, k, v)


@pytest.mark.sampled(0.033)
@pytest.mark.parametrize("kernel", ["reference", "blockwise", "decode"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.usefixtures("suspicious")
def test_kernels_pass_debug_nans_and_infs(kernel: str, mask: str, jit: bool) -> None:
    for x in attended(kernel, MASKS[mask], jit):
        assert np.isfinite(x).all()
