"""The gradients of learned arrays by flax_mha's own kernel for Hopper, in Pallas' interpreter."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from flax_mha.masks import Causal
from flax_mha.scores import Score, SoftCap
from tests.kernels.test_flex_hopper import arrays, close, learned, needs_mosaic, pulled


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1, 130, 200), (1, 2, 130, 1), (2, 1, 1, 200)])
def test_gradients_of_biases_sum_over_what_shares_them_on_hopper(hopper_memory, shape: Any) -> None:
    """With an empty tile, whose gradients are 0, and a slope that the bias passes through."""

    def call(x: Any) -> dict[str, Any]:
        given = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(7)}
        return {"mask": Causal(), "bias": x["b"], "scores": (SoftCap(2.0),), **given}

    args = call, arrays(130, 200, 8, 8, b=2), learned(b=shape)
    close(pulled("flex", *args), pulled("reference", *args), 2**-6)


# A table, how a score reads it, and the passes for its gradient: tiles read 16 entries in each.
TABLES: dict[str, tuple[tuple[int, ...], Any, int]] = {
    "of each head": ((2, 20), lambda s, b, h, i, j, t: s + t[h, (i + j) % 20], 2),
    "read twice": ((2, 9), lambda s, b, h, i, j, t: s + t[h, i % 9] * t[1 - h, j % 9], 2),
    "of functions": ((8, 2), lambda s, b, h, i, j, t: s + jnp.sin(t)[j % 8, h], 1),
}


@needs_mosaic
@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_gradients_of_tables_take_few_passes_on_hopper(hopper_memory, monkeypatch, name) -> None:
    shape, fn, passes = TABLES[name]
    found, arange = [], jnp.arange
    monkeypatch.setattr(
        "flax_mha.kernels.flex.hopper.leaves.jnp.arange",
        lambda *args, **kwargs: found.append(args) or arange(*args, **kwargs),
    )
    call = lambda x: {"mask": Causal(), "scores": (Score(fn, (x["t"],)),)}  # noqa: E731
    args = call, arrays(130, 200, 8, 8), learned(t=shape)
    close(pulled("flex", *args), pulled("reference", *args), 2**-6)
    assert passes in [len(range(*x)) for x in found if x[0] == 0 and len(x) == 3]
