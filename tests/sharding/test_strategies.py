"""The choice between context-parallel strategies."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mha import explain
from tests.support.meshes import FOUR, KINDS, on

B, T, N, H = 2, 64, 8, 4


@pytest.mark.parametrize("kind", KINDS)
def test_auto_takes_the_best_strategy(kind: str) -> None:
    """Ulysses if the heads divide, otherwise the strategy with the least memory."""

    def way(N: int, K: int, **more: Any) -> str | None:
        q, k = (jax.ShapeDtypeStruct((B, T, n, H), jnp.float32, sharding=at) for n in (N, K))
        return explain(q, k, k, **more).strategy

    mesh, leave = on(kind, FOUR)
    at = NamedSharding(mesh, P(None, "model", "data") if kind == "Explicit" else P())
    try:
        assert way(8, 8) == "ulysses"
        assert way(8, 4) == "ring"
        assert way(8, 2) == "all_gather"
        assert way(8, 8, kernel="ring:blockwise") == "ring"
        assert way(8, 4, kernel="ulysses") is None
        q = jax.ShapeDtypeStruct((B, T, 8, H), jnp.float32, sharding=at)
        table = [line.split() for line in str(explain(q, q, q, kernel="ring")).splitlines()]
        assert ["ring", "chosen"] in table
        assert ["reference", "chosen"] in table
    finally:
        leave()
    q = jax.ShapeDtypeStruct((B, T, N, H), jnp.float32)
    assert explain(q, q, q).strategy is None
    assert "ring" not in str(explain(q, q, q))


@pytest.mark.parametrize("kind", KINDS)
def test_auto_shards_heads_over_the_last_axes_that_fit(kind: str) -> None:
    """Then it passes keys over the others."""
    axes = ("a", "b", "c")
    mesh = jax.make_mesh((2, 2, 2), axes, (KINDS[kind],) * 3)
    at = NamedSharding(mesh, P(None, axes))

    def found(N: int, K: int, kernel: str = "auto") -> Any:
        q, k = (jax.ShapeDtypeStruct((B, T, n, H), jnp.float32, sharding=at) for n in (N, K))
        return explain(q, k, k, kernel=kernel)

    with jax.set_mesh(mesh), nn.logical_axis_rules([("length", axes)]):
        assert found(8, 8).strategy == "ulysses"
        assert [found(4, K).strategy for K in (4, 2, 1)] == ["usp", "usp", "ring"]
        assert found(8, 1).strategy == "all_gather"
        assert "usp" not in found(6, 2).refused
        named = found(8, 8, "usp:blockwise")
        assert (named.strategy, named.chosen) == ("usp", "blockwise")
