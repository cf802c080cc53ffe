"""Gradients of parameters under hidden NaN, as docs/guarantees.md says."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from flax_mha import MultiHeadAttention, QKNorm, masks
from flax_mha.variants import TalkingHeadsAttention
from tests.support.oracle import random_like

X = np.random.default_rng(0).normal(size=(2, 6, 16)).astype(np.float32)
N = np.array([6, 3])
REAL = (np.arange(6) < N[:, None])[..., None]
BAD = np.where(REAL, X, np.nan)
PROJECTIONS = {"query", "key", "value"}
LAYERS: dict[str, tuple[Any, set[str]]] = {
    "standard": (
        MultiHeadAttention(2, scale="learned", qk_norm=QKNorm("rmsnorm"), sinks=True),
        PROJECTIONS | {"query_ln", "key_ln", "score_scale"},
    ),
    "gated": (MultiHeadAttention(2, gate="feature"), PROJECTIONS | {"output_gate", "out"}),
    "talking heads": (TalkingHeadsAttention(2), PROJECTIONS | {"mix_scores"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_hidden_nan_reaches_the_gradients_that_meet_it(name: str) -> None:
    layer, meets = LAYERS[name]
    variables = random_like(jax.eval_shape(layer.init, jax.random.key(0), X))

    def changes(inputs: Any, **call: Any) -> tuple[set[str], bool]:
        """Return the parameters with NaN gradients, and True if a real input's differs."""

        def loss(variables: Any, inputs: Any) -> jax.Array:
            return (jnp.where(REAL, layer.apply(variables, *inputs, **call), 0) ** 2).sum()

        pull = jax.jit(jax.grad(loss, (0, 1)))
        grads, to_inputs = pull(variables, inputs)
        _, clean = pull(variables, tuple(np.where(REAL, X, 0) for _ in inputs))
        found = {path[1] for path, x in flatten_dict(grads).items() if jnp.isnan(x).any()}
        same = [
            np.allclose(np.where(REAL, got, 0), np.where(REAL, want, 0), rtol=1e-5, atol=1e-6)
            for got, want in zip(to_inputs, clean, strict=True)
        ]
        return found, not all(same)

    assert changes((BAD,), lengths=N) == (set(), False)
    assert changes((BAD,), mask=masks.Lengths(N, N)) == (meets, False)
    assert changes((X, BAD), mask=masks.Lengths(N)) == (meets & {"key", "value", "key_ln"}, False)
    assert changes((BAD,), mask=masks.Lengths(N)) == ({*variables["params"]} - {"sinks"}, False)
