"""Context parallelism: each strategy computes the result of one device."""

from typing import Any

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
    masks,
    scores,
    sharding,
)
from flax_mha.kernels.choose import STRATEGIES
from flax_mha.models import Decoder, LanguageModel, TokenEmbedding
from flax_mha.positions import PositionEmbedding, Rotary
from tests.support.meshes import BACKWARD, BOTH, EIGHT, FORWARD, FOUR, KEY, compare, on
from tests.support.oracle import error

RNG = np.random.default_rng(5)
B, T, N, H, Hv = 2, 64, 8, 4, 6
IDS = jnp.asarray(np.sort(RNG.integers(0, 4, (B, T)), axis=1))
DENSE = jnp.asarray(RNG.random((B, N, T, T)) > 0.4)


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
            "mask": masks.Dense(DENSE) & masks.Lengths(jnp.array([50, 0])), "dropout_rate": 0.2,
            "dropout_rng": KEY, "scores": (scores.Alibi(),),
        },
    ),
}  # fmt: skip


def operands(S: int, K: int) -> list[jax.Array]:
    """Return q, k, v, a bias, sinks, a table of distances, and a number for a function."""
    sizes = [(B, T, N, H), (B, S, K, H), (B, S, K, Hv), (N, T, S), (N,), (N, 32), ()]
    return [jnp.asarray(RNG.normal(size=size), jnp.float32) for size in sizes]


def attention(kernel: str, call: dict[str, Any]) -> Any:
    def attend(q, k, v, bias, sinks, table, c):
        more = scores.RelativeBias(table), scores.Score(_warped, (c,))
        return dot_product_attention(
            q, k, v, bias=bias, sinks=sinks, kernel=kernel, return_residuals=True,
            **{**call, "scores": (*call.get("scores", ()), *more)},
        )  # fmt: skip

    return attend


@pytest.mark.sampled(0.065)
@pytest.mark.parametrize(
    ("way", "kind", "name"),
    [
        ("ring", "Auto", "causal, dropout"),
        ("ring", "Explicit", "few heads, a window, documents"),
        ("ring:blockwise", "Auto", "more keys than queries"),
        ("ring:blockwise", "Explicit", "any mask of rows and heads, dropout"),
        ("ulysses:blockwise", "Explicit", "causal, dropout"),
        ("ulysses", "Auto", "causal, dropout"),
        ("all_gather", "Explicit", "any mask of rows and heads, dropout"),
    ],
)
def test_strategies_match_one_device(way: str, kind: str, name: str) -> None:
    S, K, call = CALLS[name]
    over = (None, "model", "data")
    specs = [P(*over), P(*over), P(*over), P(), P(), P(), P()]
    compare(attention(way, call), operands(S, K), kind, FOUR, specs)


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("way", "kind", "name", "shape"),
    [
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
def test_strategies_over_two_axes_match_one_device(
    way: str, kind: str, name: str, shape: tuple[int, int]
) -> None:
    S, K, call = CALLS[name]
    specs = [P(None, ("data", "model"))] * 3 + [P()] * 4
    compare(attention(way, call), operands(S, K), kind, BOTH, specs, shape)


@pytest.mark.slow
@pytest.mark.parametrize("way", STRATEGIES)
def test_explicit_mask_ids_are_sharded_like_their_tokens(way: str) -> None:
    def attend(q, k, v, ids):
        mask = masks.Causal() & masks.Segments(ids)
        return dot_product_attention(q, k, v, mask=mask, kernel=way, return_residuals=True)

    args = (*operands(T, N)[:3], IDS)
    rules, over = (
        (BOTH, P(None, ("data", "model"))) if way == "usp" else (EIGHT, P("data", "model"))
    )
    compare(attend, args, "Explicit", rules, [over] * 4)


@pytest.mark.parametrize(
    ("rules", "over", "ways"),
    [
        (FOUR, P(None, "model", "data", None), ("ulysses", "ring", "all_gather")),
        (BOTH, P(None, ("data", "model"), None, None), ("usp",)),
    ],
    ids=["one axis", "two axes"],
)
def test_explicit_output_is_sharded_like_queries(rules: Any, over: P, ways: Any) -> None:
    mesh, leave = on("Explicit", rules)
    try:
        q = jax.device_put(jnp.ones((B, T, N, H)), NamedSharding(mesh, over))
        for way in ways:
            out = jax.jit(lambda q, way=way: dot_product_attention(q, q, q, kernel=way))(q)
            assert out.sharding.spec == over, way
    finally:
        leave()


@pytest.mark.slow
def test_ring_memory_is_proportional_to_a_block() -> None:
    """T = 65,536 over 8 devices needs a few times a device's q, k, v and out."""
    T, N, H = 65536, 2, 64
    mesh, leave = on("Auto", EIGHT, shape=(1, 8))

    def loss(q, k, v):
        out = dot_product_attention(q, k, v, mask=masks.Causal(), kernel="ring:blockwise")
        return jnp.sum(jnp.sin(out))

    try:
        x = jax.ShapeDtypeStruct(
            (1, T, N, H), jnp.float32, sharding=NamedSharding(mesh, P(None, "model"))
        )
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()
    finally:
        leave()
    block = 4 * T // 8 * N * H
    assert compiled.memory_analysis().temp_size_in_bytes < 30 * block


@pytest.mark.slow
def test_long_sequence_matches_one_device() -> None:
    T = 16384
    q, k, v = (jnp.asarray(RNG.normal(size=(1, T, 1, 8)), jnp.float32) for _ in "qkv")

    def attend(q, k, v, kernel):
        return dot_product_attention(q, k, v, mask=masks.Causal(), kernel=kernel)

    whole = attend(q, k, v, "blockwise")
    mesh, leave = on("Auto", EIGHT, shape=(1, 8))
    try:
        placed = jax.device_put((q, k, v), NamedSharding(mesh, P(None, "model")))
        got = jax.device_get(jax.jit(attend, static_argnums=3)(*placed, "ring"))
    finally:
        leave()
    assert error(got, whole) < FORWARD


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "rules"), [("ring:blockwise", FOUR), ("ulysses", FOUR), ("usp", BOTH)]
)
def test_token_order_does_not_change_output(way: str, rules: Any) -> None:
    """Causality, documents and rotations follow the tokens' positions."""
    layer = MultiHeadAttention(
        8, kernel=way, rotary=Rotary(), mask=masks.Causal() & masks.Segments(IDS),
        scores=(scores.Alibi(),),
    )  # fmt: skip
    x = jnp.asarray(RNG.normal(size=(B, T, 32)), jnp.float32)
    variables = layer.init(KEY, x)
    order = sharding.zigzag(T, 4)
    moved = layer.copy(mask=masks.Causal() & masks.Segments(IDS[:, order]))

    def shuffled(x):
        return moved.apply(variables, x[:, order], order=order)[:, np.argsort(order)]

    want = layer.apply(variables, x)
    assert error(shuffled(x), want) < FORWARD
    _, leave = on("Auto", rules)
    try:
        got = jax.jit(shuffled)(x)
    finally:
        leave()
    assert error(got, want) < FORWARD


@pytest.mark.slow
def test_token_order_does_not_change_language_model() -> None:
    """Scanned and recomputed, with learned positions, on a ring."""
    block = DecoderBlock(MultiHeadAttention(8, kernel="ring", use_bias=False), 32, remat=True)
    table = PositionEmbedding("learned", T)
    model = LanguageModel(
        TokenEmbedding(16, 32), Decoder(2, block, scan=True), position_embedding=table
    )
    tokens = jnp.asarray(RNG.integers(0, 16, (B, T)))
    variables, order = model.init(KEY, tokens), sharding.zigzag(T, 4)

    def slope(variables, tokens, order=None):
        def loss(variables):
            return jnp.sum(jnp.sin(model.apply(variables, tokens, order=order)))

        return jax.grad(loss)(variables)

    want = jax.jit(slope)(variables, tokens)
    _, leave = on("Auto", FOUR)
    try:
        got = jax.jit(lambda *args: slope(*args, order))(variables, tokens[:, order])
    finally:
        leave()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert error(a, b) < BACKWARD


def test_zigzag_balances_causal_masks() -> None:
    """Each device computes equally many tiles, which it does not in the natural order."""
    T, n = 128, 4
    seen = np.asarray(masks.Causal().dense(T, T)).reshape(T, T)

    def tiles(order: np.ndarray) -> set[int]:
        pieces = seen[np.ix_(order, order)].reshape(2 * n, T // (2 * n), 2 * n, -1)
        return set(pieces.any((1, 3)).reshape(n, -1).sum(1).tolist())

    assert len(tiles(np.arange(T))) == n
    assert tiles(sharding.zigzag(T, n)) == {2 * n + 1}
    assert sharding.zigzag(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
