"""Derivatives of higher order by `checkpointed` and `reference`: hidden numbers, and meshes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from flax_mha import dot_product_attention, sharding
from flax_mha.masks import Causal, Lengths
from tests.support import oracle
from tests.support.meshes import KINDS, changed, compare


def assert_near(got: Any, want: Any, bound: float = 2e-5) -> None:
    """Check the error relative to the expected leaves."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert oracle.error(one, other) < bound


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("kernel", ["checkpointed", "reference"])
def test_huge_hidden_numbers_reach_no_tangent(kernel: str) -> None:
    """The tangent of a fully masked query is 0."""
    rng = np.random.default_rng(0)
    q, k, v, t = (jnp.asarray(rng.normal(size=(2, 20, 2, 8)), jnp.float32) for _ in range(4))
    lengths = jnp.array([13, 0])
    hidden = jnp.arange(20)[None, :, None, None] >= lengths[:, None, None, None]
    poisoned = (q, jnp.where(hidden, 3e38, k), jnp.where(hidden, -3e38, v))

    def attend(*qkv: jax.Array) -> jax.Array:
        return dot_product_attention(*qkv, mask=Lengths(lengths), kernel=kernel)

    @jax.jit
    def run(*qkv: jax.Array) -> Any:
        tangent = functools.partial(jax.jvp, attend, tangents=(t, t, t))
        # The cotangents of a fully masked query must not meet its weights either.
        asked = jnp.ones_like(q).at[1].set(3e38)
        second = jax.vjp(lambda *x: tangent(x)[1], *qkv)[1](asked)
        return *tangent(qkv), second

    out, tangent, second = run(*poisoned)
    for x in (out, tangent):
        np.testing.assert_array_equal(x[1], 0)
    clean = run(*(jnp.where(hidden, 0.0, x) if n else x for n, x in enumerate(poisoned)))
    assert_near((out, tangent, second), clean, 1e-6)
    for x in second:
        np.testing.assert_array_equal(x[1], 0)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["checkpointed", "reference"])
def test_third_derivatives_of_fully_masked_rows_are_zero(kernel: str) -> None:
    """The other rows' derivatives do not change."""
    rng = np.random.default_rng(0)
    q, t = (jnp.asarray(rng.normal(size=(2, 5, 1, 4)), jnp.float32) for _ in range(2))

    def third(q: jax.Array, t: jax.Array, lengths: jax.Array) -> jax.Array:
        def loss(q: jax.Array) -> jax.Array:
            return (dot_product_attention(q, q, q, mask=Lengths(lengths), kernel=kernel) ** 2).sum()

        def along(f: Any) -> Any:
            return lambda q: jax.jvp(f, (q,), (t,))[1]

        return along(along(jax.grad(loss)))(q)

    got = jax.jit(third)(q, t, jnp.array([4, 0]))
    np.testing.assert_array_equal(got[1], 0)
    assert oracle.error(got[:1], third(q[:1], t[:1], jnp.array([4]))) < 1e-5
    assert np.abs(got[0]).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("over", ["heads", "ulysses", "all_gather"])
def test_forward_mode_on_mesh_matches_one_device(kind: str, over: str) -> None:
    """With its gradient."""
    tokens = changed(heads=None, kv_heads=None, length="model", batch="data")
    rules = sharding.RULES if over == "heads" else tokens
    kernel = "checkpointed" if over == "heads" else f"{over}:checkpointed"
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=(4, 32, 8, 4)), jnp.float32) for _ in range(4)]

    def tangent(q: jax.Array, k: jax.Array, v: jax.Array, t: jax.Array) -> jax.Array:
        def attend(*qkv: jax.Array) -> jax.Array:
            return dot_product_attention(*qkv, mask=Causal(), kernel=kernel)

        return jax.jvp(attend, (q, k, v), (t, t, t))[1]

    compare(tangent, args, kind, rules, [P("data")] * 4)
