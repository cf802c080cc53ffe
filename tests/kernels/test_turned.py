"""Queries and keys that are rotated inside a kernel, beside those that are rotated before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import dot_product_attention, masks, positions
from flax_mha.positions.turn import Turned

ROTATIONS = {
    "whole": positions.Rotary(),
    "interleaved": positions.Rotary(base=100.0, interleaved=True),
    "part": positions.Rotary(fraction=0.5, scaling=positions.Yarn(4.0, 32)),
    "grid": positions.Axial((16, 20)),
}


@pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernel_rotates_as_the_layer(tpu: None, rotation, dtype) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, d = (
        jax.random.normal(key, (2, 300, heads, 32), dtype)
        for key, heads in zip(keys, (4, 2, 2, 4), strict=True)
    )
    mask = masks.Causal() & masks.Window(150)

    def attend(q, k, v, turn):
        q, k = (turn(x, jnp.arange(300)) for x in (q, k))
        return dot_product_attention(q, k, v, mask=mask, kernel="flex")

    def later(x, positions):
        return Turned(x, rotation.turn(x, positions))

    out, pull = jax.vjp(lambda *x: attend(*x, later), q, k, v)
    expected, pull_before = jax.vjp(lambda *x: attend(*x, rotation), q, k, v)
    np.testing.assert_array_equal(out, expected)
    tolerance = 1e-4 if dtype == "float32" else 2e-2
    for x, y in zip(pull(d), pull_before(d), strict=True):
        x, y = (np.asarray(a, np.float32) for a in (x, y))
        np.testing.assert_allclose(x, y, atol=tolerance * np.abs(y).max())
