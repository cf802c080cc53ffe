"""Context parallelism: each strategy computes the result of one device."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mha import (
    DecoderBlock,
    MultiHeadAttention,
    dot_product_attention,
    explain,
    masks,
    scores,
    sharding,
)
from flax_mha.kernels.choose import STRATEGIES
from flax_mha.models import Decoder, LanguageModel, TokenEmbedding
from flax_mha.positions import PositionEmbedding, Rotary
from tests.support.meshes import BACKWARD, BOTH, EIGHT, FORWARD, FOUR, KEY, KINDS, compare, on
from tests.support.oracle import random_like

RNG = np.random.default_rng(5)
B, T, N, H, Hv = 2, 64, 8, 4, 6
IDS = np.sort(RNG.integers(0, 4, (B, T)), axis=1)
DENSE = RNG.random((B, N, T, T)) > 0.4


def _warped(s: Any, b: Any, n: Any, i: Any, j: Any, c: Any) -> Any:
    return s * (1 + 0.1 * jnp.sin(c * (i - j + n + b).astype(s.dtype)))


# The number of keys S, of key/value heads K, and the call.
CALLS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "causal, dropout": (
        T, 8, {"mask": masks.Causal(), "dropout_rate": 0.3, "dropout_rng": KEY},
    ),
    "few heads, a window, documents": (
        T, 2,
        {"mask": masks.Window(20, 3) & masks.Segments(IDS), "scores": (scores.SoftCap(4.0),)},
    ),
    "more keys than queries": (2 * T, 4, {"mask": ~masks.Window(9, 70), "q_positions": 31}),
    "any mask of rows and heads, dropout": (
        T, 4,
        {
            "mask": masks.Dense(DENSE) & masks.Lengths(np.array([50, 0])), "dropout_rate": 0.2,
            "dropout_rng": KEY, "scores": (scores.Alibi(),),
        },
    ),
}  # fmt: skip


def operands(S: int, K: int) -> list[np.ndarray]:
    """Return q, k, v, a bias, sinks, a table of distances, and a number for a function."""
    sizes = [(B, T, N, H), (B, S, K, H), (B, S, K, Hv), (N, T, S), (N,), (N, 32), ()]
    return [np.asarray(RNG.normal(size=size), np.float32) for size in sizes]


def attention(kernel: str, call: dict[str, Any]) -> Any:
    def attend(q, k, v, bias, sinks, table, c):
        more = scores.RelativeBias(table), scores.Score(_warped, (c,))
        return dot_product_attention(
            q, k, v, bias=bias, sinks=sinks, kernel=kernel, return_residuals=True,
            **{**call, "scores": (*call.get("scores", ()), *more)},
        )  # fmt: skip

    return attend


# Over one axis of the mesh, or over two.
ONE, TWO = (FOUR, P(None, "model", "data")), (BOTH, P(None, ("data", "model")))


@pytest.mark.sampled(0.039)
@pytest.mark.parametrize(
    ("way", "kind", "name", "shape"),
    [
        ("ring", "Auto", "causal, dropout", None),
        ("ring", "Explicit", "few heads, a window, documents", None),
        ("ring:blockwise", "Auto", "more keys than queries", None),
        ("ring:blockwise", "Explicit", "any mask of rows and heads, dropout", None),
        ("ulysses:blockwise", "Explicit", "causal, dropout", None),
        ("ulysses", "Auto", "causal, dropout", None),
        ("all_gather", "Explicit", "any mask of rows and heads, dropout", None),
        ("all_gather", "Explicit", "few heads, a window, documents", (2, 4)),
        ("usp:blockwise", "Explicit", "causal, dropout", (2, 4)),
        ("usp", "Auto", "any mask of rows and heads, dropout", (2, 4)),
        ("usp", "Explicit", "few heads, a window, documents", (4, 2)),
        ("usp:blockwise", "Auto", "more keys than queries", (4, 2)),
        # A ring of one device, and one device for the heads.
        ("usp", "Auto", "causal, dropout", (1, 8)),
        ("usp", "Auto", "causal, dropout", (8, 1)),
        ("ulysses", "Auto", "causal, dropout", (2, 4)),
        ("ring", "Explicit", "few heads, a window, documents", (2, 4)),
    ],
)
def test_strategies_match_one_device(
    way: str, kind: str, name: str, shape: tuple[int, int] | None
) -> None:
    """Over one axis of the mesh, or over two if a shape is given."""
    S, K, call = CALLS[name]
    rules, over = TWO if shape else ONE
    specs = [over, over, over, P(), P(), P(), P()]
    compare(attention(way, call), operands(S, K), kind, rules, specs, shape or (2, 4))


def test_a_causal_ring_of_four_matches_one_device() -> None:
    """Also if the lse is unused."""
    attend = attention("ring:reference", {"mask": masks.Causal()})

    def both(q: Any, k: Any, v: Any, *learned: Any) -> Any:
        alone = dot_product_attention(q, k, v, mask=masks.Causal(), kernel="ring:reference")
        return *attend(q, k, v, *learned), alone

    specs = [ONE[1]] * 3 + [P()] * 4
    compare(both, operands(T, 2), "Auto", ONE[0], specs, (2, 4))


@pytest.mark.parametrize("way", STRATEGIES)
def test_explicit_output_is_sharded_like_queries(way: str) -> None:
    """The ids of a mask are sharded like their tokens."""
    rules, over = TWO if way == "usp" else ONE
    with on("Explicit", rules) as mesh:

        def attend(q: jax.Array, ids: jax.Array) -> jax.Array:
            return dot_product_attention(q, q, q, mask=masks.Segments(ids), kernel=way)

        q, ids = (
            jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*over[: len(shape)])))
            for shape, dtype in (((B, T, N, H), jnp.float32), ((B, T), jnp.int32))
        )
        out = jax.eval_shape(attend, q, ids)
    assert out.sharding.spec == P(*over, *(None,) * (4 - len(over)))


@pytest.mark.parametrize("kind", KINDS)
def test_auto_takes_the_best_strategy(kind: str) -> None:
    """Ulysses if the heads divide, otherwise the strategy with the least memory."""

    def way(N: int, K: int, **more: Any) -> str | None:
        q, k = (jax.ShapeDtypeStruct((B, T, n, H), jnp.float32, sharding=at) for n in (N, K))
        return explain(q, k, k, **more).strategy

    with on(kind, FOUR) as mesh:
        at = NamedSharding(mesh, P(None, "model", "data") if kind == "Explicit" else P())
        assert way(8, 8) == "ulysses"
        assert way(8, 4) == "ring"
        assert way(8, 2) == "all_gather"
        assert way(8, 8, kernel="ring:blockwise") == "ring"
        assert way(8, 4, kernel="ulysses") is None
        q = jax.ShapeDtypeStruct((B, T, 8, H), jnp.float32, sharding=at)
        table = [line.split() for line in str(explain(q, q, q, kernel="ring")).splitlines()]
        assert ["ring", "chosen"] in table
        assert ["reference", "chosen"] in table
    q = jax.ShapeDtypeStruct((B, T, N, H), jnp.float32)
    assert explain(q, q, q).strategy is None
    assert "ring" not in str(explain(q, q, q))


@pytest.mark.parametrize("kind", KINDS)
def test_auto_shards_heads_over_the_last_axes_that_fit(kind: str) -> None:
    """Keys are passed over the other axes."""
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


@pytest.mark.slow
def test_ring_memory_is_proportional_to_a_block() -> None:
    """T = 65,536 over 8 devices needs a few times a device's q, k, v and out."""
    T, N, H = 65536, 2, 64
    with on("Auto", EIGHT, shape=(1, 8)) as mesh:

        def loss(q, k, v):
            out = dot_product_attention(q, k, v, mask=masks.Causal(), kernel="ring:blockwise")
            return jnp.sum(jnp.sin(out))

        x = jax.ShapeDtypeStruct(
            (1, T, N, H), jnp.float32, sharding=NamedSharding(mesh, P(None, "model"))
        )
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()
    block = 4 * T // 8 * N * H
    assert compiled.memory_analysis().temp_size_in_bytes < 30 * block


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "rules"), [("ring:blockwise", FOUR), ("ulysses", FOUR), ("usp", BOTH)]
)
def test_token_order_does_not_change_output(way: str, rules: Any) -> None:
    """Causality, documents, rotations and learned positions follow the tokens' positions."""
    mask = masks.Causal() & masks.Documents([9, 30, 3, 22])
    layer = MultiHeadAttention(
        8, kernel=way, rotary=Rotary(), mask=mask, scores=(scores.Alibi(),), use_bias=False
    )
    model = LanguageModel(
        TokenEmbedding(16, 32), Decoder(2, DecoderBlock(layer, 32, remat=True), scan=True),
        position_embedding=PositionEmbedding("learned", T),
    )  # fmt: skip
    tokens = RNG.integers(0, 16, (B, T))
    variables = random_like(jax.eval_shape(model.init, KEY, tokens))
    order = sharding.zigzag(T, 4)

    def in_order(variables: Any) -> jax.Array:
        out = model.apply(variables, tokens[:, order], order=order)
        return out[:, np.argsort(order)]

    def alone(variables: Any) -> jax.Array:
        return model.apply(variables, tokens)

    bounds = 5 * FORWARD, 2 * BACKWARD
    compare(in_order, (variables,), "Auto", rules, [P()], alone=alone, bounds=bounds)
