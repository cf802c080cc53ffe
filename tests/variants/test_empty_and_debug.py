"""Layers of no rows or no tokens, and under JAX's checks for NaN and infinities."""

from typing import Any

import jax
import numpy as np
import pytest

from flax_mha import MultiHeadAttention, dot_product_attention, variants
from flax_mha.kernels.call.normalizers import OTHERS
from flax_mha.positions import DynamicNtk, LongRope, Rotary

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(2, 6, 16)).astype(np.float32)
SCALED = {"ntk": DynamicNtk(2.0, 4), "long": LongRope((1.0,) * 4, (2.0,) * 4, 4)}
LAYERS: dict[str, Any] = {
    "forgetting": variants.ForgettingAttention(2),
    "differential": variants.DifferentialAttention(2),
    "talking heads": variants.TalkingHeadsAttention(2),
    "chosen": variants.ChosenBlocksAttention(2, block=4, count=2),
    "chosen together": variants.ChosenBlocksAttention(2, block=4, count=2, query_block=2),
    "latent": variants.MultiHeadLatentAttention(2, rotary=Rotary()),
    **{name: MultiHeadAttention(2, rotary=Rotary(scaling=x)) for name, x in SCALED.items()},
    **{name: MultiHeadAttention(2, normalizer=name) for name in OTHERS},
}


def pulled(layer: Any, x: Any) -> Any:
    """Return the output and the gradients, with parameters from x itself."""
    variables = layer.init(KEY, x)
    return jax.value_and_grad(lambda v, x: layer.apply(v, x).sum(), (0, 1))(variables, x)


@pytest.mark.sampled(0.06)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("size", [(0, 6), (2, 0), (0, 0)])
def test_layers_take_no_rows_and_no_tokens(name: str, size: tuple[int, int]) -> None:
    x = X[: size[0], : size[1]]
    for y in jax.tree.leaves(jax.jit(lambda x: pulled(LAYERS[name], x))(x)):
        np.testing.assert_array_equal(y, 0)


@pytest.mark.parametrize("size", [(4, 0), (0, 4)])
def test_normalizers_take_no_queries_and_no_keys(size: tuple[int, int]) -> None:
    q, k = (np.ones((2, n, 2, 8), np.float32) for n in size)

    def loss(q: jax.Array, k: jax.Array) -> jax.Array:
        return sum(dot_product_attention(q, k, k, normalizer=name).sum() for name in OTHERS)

    for y in jax.tree.leaves(jax.jit(jax.value_and_grad(loss, (0, 1)))(q, k)):
        np.testing.assert_array_equal(y, 0)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_pass_debug_nans_and_infs(name: str) -> None:
    """Initialization, forward, gradient and decoding, each operation by itself."""
    layer = LAYERS[name]
    with jax.debug_nans(True), jax.debug_infs(True):
        jax.clear_caches()  # Programs compiled before are not checked.
        pulled(layer, X)
        layer.apply(layer.init(KEY, X), X, lengths=np.array([6, 3]))
        if name != "chosen together":
            step = layer.clone(decode=True)
            variables = step.init(KEY, X)
            _, new = step.apply(variables, X[:, :2], mutable="cache")
            step.apply({**variables, **new}, X[:, 2:3], mutable="cache")
