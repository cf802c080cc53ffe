"""Windows whose limits are arrays: layers of one scan that differ, decoding, errors."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import CacheConfig, MultiHeadAttention, dot_product_attention, masks
from tests.support.arrays import random_variables
from tests.support.decoding import decoded

KEY = jax.random.key(0)
T, D = 40, 16
X = np.random.default_rng(0).normal(size=(2, T, D)).astype(np.float32)
WINDOWS = (3, 64, 0)


class Layer(nn.Module):
    """A layer with a residual, whose window is an argument."""

    @nn.compact
    def __call__(self, x: Any, left: Any) -> tuple[Any, None]:
        layer = MultiHeadAttention(2, mask=masks.Causal())
        return x + layer(x, mask=masks.Window(left)), None


@pytest.mark.sampled(0.08)
def test_layers_of_one_scan_have_windows_of_their_own() -> None:
    """Gradients too, under remat."""
    scanned = nn.scan(
        nn.remat(Layer, prevent_cse=False),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=len(WINDOWS),
    )()
    windows = jnp.array(WINDOWS)
    params = random_variables(scanned, X, windows)

    def loss(params: Any, x: Any) -> Any:
        return jnp.sin(scanned.apply(params, x, windows)[0]).sum()

    def one_by_one(params: Any, x: Any) -> Any:
        for n, left in enumerate(WINDOWS):
            x, _ = Layer().apply(jax.tree.map(lambda leaf: leaf[n], params), x, left)  # noqa: B023
        return jnp.sin(x).sum()

    actual, wanted = (jax.jit(jax.grad(f, (0, 1)))(params, X) for f in (loss, one_by_one))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), actual, wanted)


@pytest.mark.sampled(0.08)
def test_decoding_by_a_traced_window() -> None:
    layer = MultiHeadAttention(2, decode=True)
    whole = layer.clone(decode=False, mask=masks.Causal())
    params = random_variables(whole, X)
    steps = decoded(layer, params, X, (30, *(1,) * 10), mask=masks.Window(jnp.int32(5)))
    wanted = jax.jit(whole.apply)(params, X, mask=masks.Window(5))
    np.testing.assert_allclose(steps, wanted, atol=1e-5)


def test_ring_buffer_needs_a_number() -> None:
    layer = MultiHeadAttention(
        2, decode=True, mask=masks.Window(np.array(3), 0), cache=CacheConfig(slots=8)
    )
    with pytest.raises(ValueError, match=r"give .*mask=masks.Window\(W, 0\) with W at most 7"):
        layer.init(KEY, X)


@pytest.mark.parametrize(
    ("limit", "error", "message"),
    [
        (jnp.array(1.5), TypeError, "Window.left must be integers, got float32"),
        (jnp.array([1, 2, 3]), ValueError, r"Window.left must have shape \[\] = \(\) or \[\*B\]"),
        ([1, 2], TypeError, "Window.left must be an int, got"),
        (-1, ValueError, "Window.left must be in 0 …"),
    ],
)
def test_other_limits_raise(limit: Any, error: type[Exception], message: str) -> None:
    q = jnp.asarray(X)[..., None, :]
    with pytest.raises(error, match=message):
        dot_product_attention(q, q, q, mask=masks.Window(limit))
