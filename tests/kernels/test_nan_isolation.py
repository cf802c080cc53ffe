"""NaN in one row of the batch and key/value head changes no bit of other rows and groups."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from flax_mha import KVCache, dot_product_attention
from flax_mha.masks import Causal, Segments
from flax_mha.scores import Alibi, SoftCap
from tests.kernels.cases import KERNELS, pairs
from tests.kernels.test_ring import RULES

B, T, N, K, H = 2, 8, 4, 2, 8
MASK = Causal() & Segments(np.arange(T) // 6, runs=True, at_most=2)
MORE = {"scores": (SoftCap(5.0), Alibi()), "sinks": jnp.ones(N)}
WAYS: dict[str, Any] = {
    "jit": lambda f: f,
    "remat": jax.checkpoint,
    "vmap": lambda f: jax.vmap(lambda *x: jax.tree.map(lambda y: y[0], f(*(y[None] for y in x)))),
}


def check(
    kernel: str, way: str = "jit", dtype: str = "float32", rtol: float = 0, **call: Any
) -> None:
    """Compare the numbers of all other rows and groups with and without NaN in q, k or v."""
    rng = np.random.default_rng(0)
    qkv = [jnp.asarray(rng.normal(size=(B, T, n, H)), dtype) for n in (N, K, K)]

    def one(*qkv: jax.Array) -> Any:
        return dot_product_attention(*qkv, mask=MASK, kernel=kernel, return_residuals=True, **call)

    @jax.jit
    def run(*qkv: jax.Array) -> Any:
        def loss(*qkv: jax.Array) -> Any:
            out, lse = WAYS[way](one)(*qkv)
            return jnp.sin(out.astype("f4")).sum() + jnp.sin(lse).sum(), (out, lse)

        grads, results = jax.grad(loss, (0, 1, 2), has_aux=True)(*qkv)
        return *results, *grads

    def numbers(*qkv: jax.Array) -> list[np.ndarray]:
        out, lse, *grads = run(*qkv)
        return [out, np.swapaxes(lse, 1, 2), *grads]

    clean = numbers(*qkv)
    for place in range(3):
        bad = [y.at[0, 2, 0].set(jnp.nan) if n == place else y for n, y in enumerate(qkv)]
        got = numbers(*bad)
        # The queries that see it: only its own for NaN in q, which is in the first head.
        assert np.isnan(got[0][0, 2 : 6 if place else 3, : N // K if place else 1]).all()
        for x, y in zip(got, clean, strict=True):
            np.testing.assert_allclose(x[1], y[1], rtol)
            np.testing.assert_allclose(x[0, :, x.shape[2] // K :], y[0, :, y.shape[2] // K :], rtol)


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize(
    ("kernel", "way", "more"), pairs(kernel=KERNELS, way=(*WAYS,), more=(False, True))
)
def test_nan_changes_nothing_in_other_rows_and_groups(kernel: str, way: str, more: bool) -> None:
    check(kernel, way, **(MORE if more else {}))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["short", "flex"])
def test_nan_changes_nothing_in_other_rows_and_groups_on_tpu(tpu, kernel: str) -> None:
    check(kernel)


@pytest.mark.slow
def test_nan_changes_nothing_in_other_rows_and_groups_on_hopper(hopper_memory) -> None:
    check("flex", dtype="bfloat16")


@pytest.mark.sampled(0.13, slow=0.2)
def test_nan_changes_nothing_in_other_rows_and_groups_of_cudnn(nvidia) -> None:
    # The sum over queries has another order where NaN is isolated.
    check("cudnn", dtype="bfloat16", rtol=1e-6)


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("kernel", ["ring:blockwise", "ring:reference", "ulysses", "all_gather"])
def test_nan_changes_nothing_in_other_rows_and_groups_on_meshes(kernel: str) -> None:
    mesh = jax.make_mesh((1, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        check(kernel)


@pytest.mark.sampled(0.13, slow=0.2)
def test_nan_of_an_example_changes_no_gradient_of_others_with_slots_on_devices() -> None:
    mesh = jax.make_mesh((1, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    k = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, N, H)), jnp.float32)

    @jax.jit
    @jax.grad
    def gradient(k: jax.Array) -> jax.Array:
        cache = KVCache.empty((B,), T, N, H).append(k, k)
        out = cache.attend(k[:, :1], jnp.full((B, 1), T - 1), sinks=jnp.ones(N))
        return jnp.sin(out[1]).sum()

    with jax.set_mesh(mesh), nn.logical_axis_rules([("cache_length", "model")]):
        got, want = gradient(k.at[0, 2].set(jnp.nan)), gradient(k)
    np.testing.assert_array_equal(got[1], want[1])
