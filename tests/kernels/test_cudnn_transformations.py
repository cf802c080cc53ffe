"""The kernel for NVIDIA GPUs under vmap, scan, remat and meshes, with a model of cuDNN."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from flax_mha import sharding
from flax_mha.masks import Causal, Lengths
from tests.kernels.half_precision import close, run
from tests.kernels.oracle_check import B, N, arrays

T, S = 40, 64


@pytest.mark.sampled(0.13, slow=0.2)
def test_jacobian_matches_reference(nvidia) -> None:
    """Only the cotangent is mapped."""
    q, k, v, _ = (x[:1, :2] for x in arrays(T, S, 2, "bfloat16"))
    results = [
        jax.jit(jax.jacrev(lambda q, kernel=kernel: run(q, k, v, kernel, mask=Causal())[0]))(q)
        for kernel in ("cudnn", "reference")
    ]
    jax.tree.map(close, *results)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask",
    [None, Lengths(jnp.array([13, 64]), jnp.array([40, 5])) & Causal()],
    ids=["none", "lengths"],
)
@pytest.mark.parametrize("shape", [None, (T, S), (B, N, T, S)], ids=str)
def test_cudnn_on_mesh_matches_one_device(nvidia, mask, shape: tuple[int, ...] | None) -> None:
    qkv = arrays(T, S, 2, "bfloat16")[:3]
    rng = np.random.default_rng(4)
    bias = None if shape is None else jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    def both(qkv, bias):
        def loss(qkv, bias):
            out, lse = run(*qkv, mask=mask, bias=bias)
            lse = jnp.where(jnp.isfinite(lse), lse, 0.0)
            return (out**2).sum(dtype=jnp.float32) + lse.sum()

        return jax.value_and_grad(loss, 0 if bias is None else (0, 1))(qkv, bias)

    expected = jax.jit(both)(qkv, bias)
    kind = AxisType.Explicit if mask is None else AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
        got = jax.jit(both)(qkv, bias)
    jax.tree.map(functools.partial(close, bound=2e-2), got, expected)
