"""Blocks that queries choose: by scores and in a layer, against the formula and in steps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import masks
from flax_mha.positions import Rotary
from flax_mha.variants import ChosenBlocksAttention
from tests.support import oracle
from tests.support.decoding import decoded
from tests.support.layer_checks import drawn
from tests.support.oracle import error, float64

N, K, H, D, T, BLOCK = 4, 2, 6, 16, 22, 4
X = np.random.default_rng(0).normal(size=(2, T, D)).astype(np.float32)


def layer(**fields: Any) -> ChosenBlocksAttention:
    defaults: dict[str, Any] = {
        "num_kv_heads": K, "head_dim": H, "rotary": Rotary(100.0),
        "block": BLOCK, "count": 3,
    }  # fmt: skip
    return ChosenBlocksAttention(N, **defaults | fields)


def expected(params: Any, x: Any, query_block: int = 1, mask: Any = True) -> np.ndarray:
    """Compute the layer query by query. `mask` is bool, broadcastable to [B, N, T, T]."""
    x, p = float64(x), float64(params)
    q, k, v = (oracle.project(p[name], x) for name in ("query", "key", "value"))
    q, k = (oracle.rotary(y, np.arange(T), base=100.0) for y in (q, k))
    G = N // K
    k_of = np.repeat(k, G, 2)
    may = np.broadcast_to(np.tri(T, dtype=bool) & mask, (2, N, T, T))
    allowed = np.zeros((2, N, T, T), bool)
    for b, n, i in np.ndindex(2, N, T):
        first = i // query_block * query_block
        together, past = slice(first, first + query_block), first // BLOCK
        seen = may[b, n, together].any(0)
        asks = q[b, first + int(seen[together].argmax()), n]
        scores = {}
        for c in range(past):
            keys = np.flatnonzero(seen & (np.arange(T) // BLOCK == c))
            if len(keys):
                scores[c] = asks @ k_of[b, keys, n].mean(0)
        own = [c for c in {j // BLOCK for j in np.flatnonzero(seen)} if c >= past]
        for c in [*sorted(scores, key=scores.get, reverse=True)[: 3 - len(own)], *own]:
            allowed[b, n, i, BLOCK * c : BLOCK * (c + 1)] = True
    out, _, _ = oracle.attention(q, k, v, allowed=allowed & may)
    return oracle.project(p["out"], out, contracted=2)


@pytest.mark.sampled(0.06)
@pytest.mark.parametrize("kernel", ["reference", "blockwise"])
@pytest.mark.parametrize("fields", [{}, {"query_block": 2}, {"query_block": 8}])
def test_chosen_blocks_match_formula(kernel: str, fields: dict[str, Any]) -> None:
    module = layer(kernel=kernel, **fields)
    params = drawn(module, X)
    assert error(jax.jit(module.apply)(params, X), expected(params["params"], X, **fields)) < 5e-6


@pytest.mark.sampled(0.12)
@pytest.mark.parametrize("fields", [{}, {"query_block": 8}])
def test_choices_use_only_visible_keys(fields: dict[str, Any]) -> None:
    """Block means cover visible keys only, and blocks without any are never chosen."""
    rng = np.random.default_rng(2)
    table = rng.random((2, N, T, T)) < 0.5
    # Hide whole blocks, including the queries' own, and the first query of a block of queries.
    table &= np.repeat(rng.random((2, N, T, -(-T // BLOCK))) < 0.6, BLOCK, -1)[..., :T]
    table[:, 1, :, 8] = False
    module = layer(**fields)
    params = drawn(module, X)
    found = jax.jit(lambda params, mask: module.apply(params, X, mask=mask))(params, table)
    assert error(found, expected(params["params"], X, **fields, mask=table)) < 5e-6


@pytest.mark.sampled(0.096)
@pytest.mark.parametrize("fields", [{}, {"query_block": 8}, {"decode": True}], ids=str)
def test_document_does_not_affect_others(fields: dict[str, Any]) -> None:
    """A change of one document leaves the other documents unchanged."""
    lengths = [5, 12]
    module = layer(mask=masks.Documents(np.array(lengths)), **fields)
    params = drawn(layer(), X)
    ids = np.searchsorted(np.cumsum(lengths), np.arange(T), side="right")
    # Rows with large numbers in one of the first two documents.
    x = np.concatenate([X, *(np.where((ids == n)[:, None], 1e6, X) for n in range(2))])
    out = decoded(module, params, x) if module.decode else jax.jit(module.apply)(params, x)
    block, mask = fields.get("query_block", 1), ids[:, None] == ids
    wanted = expected(params["params"], X, query_block=block, mask=mask)
    assert error(out[:2], wanted) < 5e-6
    for n in range(2):
        actual = out[2 * n + 2 : 2 * n + 4, ids != n]
        assert error(actual, wanted[:, ids != n]) < 5e-6


def test_top_blocks_are_the_best_and_the_query_block() -> None:
    """By hand: earlier and later blocks, forced and forbidden ones, and positions."""
    inf = np.inf
    scores = np.array([[9, 9, 9, 9], [1, 0, 9, 9], [1, inf, 0, 9], [2, -inf, 3, 0]], np.float32)

    def seen(count: int, scores: Any = scores, **rest: Any) -> str:
        mask = masks.top_blocks(jnp.asarray(scores), count, query_block=1, key_block=1, **rest)
        return mask.show(len(scores), 4).rpartition("\n")[0]

    assert seen(1) == "█···\n·█··\n··█·\n···█"
    assert seen(2) == "█···\n██··\n·██·\n··██"
    assert seen(3) == "█···\n██··\n███·\n█·██"
    # Invisible blocks are never chosen, and NaN never replaces the query's own block.
    visible = np.array([[1, 0, 1, 1], [1, 0, 1, 1], [1, 0, 1, 1], [1, 0, 1, 1]], bool)
    assert seen(2, visible=visible) == "█···\n█···\n█·█·\n··██"
    assert seen(2, np.where(np.isfinite(scores), scores, np.nan)) == "█···\n██··\n·██·\n·█·█"
    later = masks.top_blocks(scores[:2], 2, query_block=1, key_block=1, positions=np.array([2, 3]))
    assert isinstance(later, masks.And)
    np.testing.assert_array_equal(np.sort(later.masks[1].blocks)[0], [[0, 2], [2, 3]])


ONES = np.ones((2, 2), np.float32)


@pytest.mark.parametrize(
    ("scores", "given", "words"),
    [
        (np.ones((2, 2), int), {}, "scores must be floating point"),
        (ONES, {"count": 0}, "count must be at least 1"),
        (ONES, {"query_block": 4, "key_block": 2}, "count must be at least 2"),
        (ONES, {"query_block": 1, "positions": [1]}, r"positions must have shape \[nq\]"),
        (ONES, {"visible": np.ones((3, 2), bool)}, "visible must broadcast"),
    ],
)
def test_invalid_block_scores_raise(scores: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        masks.top_blocks(scores, **{"count": 1, "query_block": 2, "key_block": 2} | given)
