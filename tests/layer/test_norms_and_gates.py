"""Padding and errors of norms and gates. Feature pairs compare their numbers with float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import Encoder, EncoderBlock, MultiHeadAttention, QKNorm, masks
from flax_mha.positions import Rotary
from tests.support.oracle import random_like

D, T = 16, 12
KEY = jax.random.key(0)
X = np.random.default_rng(1).normal(size=(2, T, D)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_does_not_reach_gradients_under_scan(dtype: str) -> None:
    """Gradients are finite."""
    layer = MultiHeadAttention(
        4, num_kv_heads=2, rotary=Rotary(100.0), mask=masks.Causal(), qk_norm=QKNorm(), gate="head",
        dtype=dtype,
    )  # fmt: skip
    block = EncoderBlock(layer, 8, remat=True)
    stack = Encoder(2, block, scan=True)
    lengths = jnp.array([T, 5])

    def loss(params: Any, x: jax.Array) -> jax.Array:
        y = stack.apply(params, x, lengths=lengths)
        return jnp.sum(jnp.sin(y[1, :5].astype(jnp.float32)))

    bad = np.array(X)
    bad[1, 5:] = np.nan
    pull = jax.jit(jax.grad(loss, (0, 1)))
    # Flax's norms promote their statistics implicitly.
    with jax.numpy_dtype_promotion("standard"):
        params = random_like(jax.eval_shape(stack.init, KEY, X.astype(dtype)))
        (actual, dx), (wanted, _) = (pull(params, jnp.asarray(x, dtype)) for x in (bad, X))
    jax.tree.map(np.testing.assert_array_equal, actual, wanted)
    assert np.isfinite(dx).all()
    assert np.abs(actual["params"]["layers"]["attention"]["output_gate"]["kernel"]).max() > 0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: QKNorm("rms"), ValueError, r"kind must be one of \['layernorm', 'rmsnorm'\], got"),
        (lambda: MultiHeadAttention(4, qk_norm=QKNorm(), normalize_qk=True).init(KEY, X),
         ValueError, r"normalize_qk=True is qk_norm=QKNorm\('layernorm'\), got both"),
        (lambda: MultiHeadAttention(4, gate="heads").init(KEY, X), ValueError,
         r"gate must be one of \['feature', 'head'\], got 'heads'"),
    ],
)  # fmt: skip
def test_invalid_norms_and_gates_raise(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
