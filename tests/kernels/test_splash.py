"""The splash kernel for TPUs, interpreted: what its cases in the contract leave out."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from flax_mha import dot_product_attention, sharding
from flax_mha.masks import Causal, Lengths, Segments
from tests.kernels.oracle_check import B, arrays, check

T, S = 280, 300
run = functools.partial(dot_product_attention, kernel="splash")


@pytest.mark.slow
def test_splash_takes_traced_positions_for_lengths(tpu) -> None:
    at = np.arange(S)[::-1]
    call = {"kv_positions": jnp.asarray(at), "mask": Lengths(jnp.array([30, 200]))}
    known = {"allowed": (at < np.array([[30], [200]]))[:, None, None]}
    check("splash", arrays(T, S, 2), known, lambda _: call, {}, has_lse=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_splash_on_mesh_matches_one_device(tpu, kind: str) -> None:
    qkv = arrays(T, S, 2)[:3]
    ids = np.sort(np.random.default_rng(0).integers(-2, 3, (B, S)), axis=1)
    mask = Causal() & Segments(jnp.asarray(ids[:, :T]), jnp.asarray(ids))

    def both(qkv):
        return jax.value_and_grad(lambda qkv: (run(*qkv, mask=mask) ** 2).sum())(qkv)

    expected = jax.jit(both)(qkv)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType[kind],) * 2)
    with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
        got = jax.jit(both)(qkv)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, got, expected)
