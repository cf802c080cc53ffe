"""The choice between context-parallel strategies, and the calls that they refuse."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mha import dot_product_attention, explain
from flax_mha.base.shapes import Dims
from flax_mha.kernels.mesh.shards import Division
from tests.support.meshes import BOTH, FOUR, KINDS, on

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
    q = jnp.ones((B, T, N, H))
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
        # The number of devices that share the positions inside attention.
        rings = {}
        for heads in (8, 4, 2):
            q = jax.ShapeDtypeStruct((B, T, heads, H), jnp.float32, sharding=at)
            division = Division.of(q, q)
            assert division is not None
            rings[heads] = division.inside("usp", Dims.of(q, q, q)).devices
        assert rings == {8: 2, 4: 2, 2: 4}


MISUSES = {
    "heads do not divide": (FOUR, (T, 4), "ulysses", "8 devices .* 8 query heads and 4 key/value"),
    "heads do not divide over the inner axis": (
        BOTH, (T, 2), "usp", "4 devices .* 8 query heads and 2 key/value",
    ),
    "one axis of positions": (FOUR, (T, N), "usp", r"needs .* \('length', .*, got 'model'"),
    "an unknown strategy": (FOUR, (T, N), "round:blockwise", "alone or as in 'ring:blockwise'"),
    "an unknown kernel": (FOUR, (T, N), "ring:fast", "kernel must be 'auto' or one of"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_raises(name: str) -> None:
    rules, (S, K), kernel, message = MISUSES[name]
    _, leave = on("Auto", rules)
    q, k = jnp.ones((B, T, N, H)), jnp.ones((B, S, K, H))
    try:
        with pytest.raises(ValueError, match=message):
            dot_product_attention(q, k, k, kernel=kernel)
    finally:
        leave()


def test_ring_shards_keys() -> None:
    """On Explicit axes they may arrive replicated."""
    mesh, leave = on("Explicit", ())
    q, k = jnp.ones((B, T, N, H)), jnp.ones((B, T + 2, N, H))
    try:
        q = jax.device_put(q, NamedSharding(mesh, P(None, "model")))
        with pytest.raises(ValueError, match="66 keys do not divide over 4 devices"):
            dot_product_attention(q, k, k, kernel="ring")
        both = jax.device_put(q, NamedSharding(mesh, P(None, ("data", "model"))))
        with pytest.raises(ValueError, match="65 keys do not divide over 2 devices"):
            dot_product_attention(both, k[:, 1:], k[:, 1:], kernel="usp")
        out = jax.eval_shape(
            lambda q, k: dot_product_attention(q, k, k, kernel="ring"), q, k[:, :T]
        )
        assert out.shape == q.shape
    finally:
        leave()
