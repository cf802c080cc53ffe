"""Masks against their definitions, written out pair by pair."""

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from flax_mha import dot_product_attention, masks
from flax_mha.base.coordinates import At, tiles_of, whole
from flax_mha.base.shapes import Dims
from flax_mha.masks import (
    EMPTY,
    FULL,
    BlockSparse,
    Causal,
    Dense,
    Dilated,
    Documents,
    Keys,
    Lengths,
    Mask,
    Neighborhood,
    Predicate,
    Prefix,
    Segments,
    Window,
)
from flax_mha.masks.algebra import resolve
from tests.masks.catalogue import MASKS, Scene
from tests.support.algebra import Expression, evaluate, expressions

B, N, T, S = 2, 3, 5, 6
DIMS = Dims((B,), T, S, N, N, 4, 4)

KV = np.array([3, 0])
TABLE = np.random.default_rng(0).random((B, N, T, S)) < 0.5


def table(mask: Mask, dims: Dims = DIMS) -> jax.Array:
    allowed = mask.bind(dims).allowed(whole(dims))
    return jnp.broadcast_to(allowed, dims.logits)


def verdicts(mask: Mask, dims: Dims, block_q: int, block_k: int) -> Any:
    at = whole(dims)
    return resolve(mask.bind(dims), at).tiles(tiles_of(at.q, at.k, block_q, block_k))


@pytest.mark.parametrize("place", ["from_0", "aligned", "scattered"])
@pytest.mark.parametrize("batch", [(), (B,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_mask_matches_its_definition(name: str, batch: tuple[int, ...], place: str) -> None:
    scene, dims = Scene(batch, T, S, place, N=N), DIMS._replace(B=batch)
    mask, allowed = MASKS[name](scene)
    at = whole(dims, scene.q_positions, scene.kv_positions)
    for same in (mask, jax.tree.map(jnp.asarray, mask)):
        found = np.broadcast_to(same.bind(dims).allowed(at), dims.logits)
        np.testing.assert_array_equal(found, scene.table(allowed))


@pytest.mark.sampled(0.08)
@given(expressions(MASKS), st.integers(1, 4), st.integers(1, 4))
def test_expressions_and_their_tiles_match_boolean_tables(
    expression: Expression, block_q: int, block_k: int
) -> None:
    """EMPTY tiles have no allowed pair and FULL tiles only allowed ones, at every tile size."""

    def atom(name: str) -> tuple[Mask, np.ndarray]:
        scene = Scene((B,), T, S, N=N)
        mask, allowed = MASKS[name](scene)
        return mask, scene.table(allowed)

    mask, expected = evaluate(expression, atom)
    np.testing.assert_array_equal(table(mask), expected)
    verdict = verdicts(mask, DIMS, block_q, block_k)
    nq, nk = -(-T // block_q), -(-S // block_k)
    verdict = np.broadcast_to(verdict, (B, N, nq, nk))
    for q, k in np.ndindex(nq, nk):
        rows, columns = (
            slice(x * size, (x + 1) * size) for x, size in ((q, block_q), (k, block_k))
        )
        tile = expected[:, :, rows, columns]
        assert not tile[verdict[:, :, q, k] == EMPTY].any()
        assert tile[verdict[:, :, q, k] == FULL].all()


@pytest.mark.parametrize(
    ("mask", "empty", "full"),
    [
        (Causal(), 6, 6),
        (Window(4, 0), 9, 0),
        (Window(np.array(4), np.array(0)), 9, 0),
        (Causal() & Window(left=4), 9, 0),
        (Prefix(8), 5, 9),
        (Segments(np.arange(16) // 8), 8, 8),
        (Lengths(np.array(8)), 8, 8),
        (Dense(np.arange(16) < 4), 12, 4),
        (Keys(np.arange(16) < 4), 12, 4),
        (Documents(np.array([8, 8])), 8, 8),
        (Neighborhood((4, 4), (1, 4)), 12, 4),
        (Neighborhood((4, 4), (3, 4)), 4, 12),
        (Neighborhood((2, 2, 4), (1, 2, 4)), 8, 8),
        (BlockSparse([[0], [0], [3], [1]], 4, 4), 12, 4),
        (BlockSparse([[1, 0, 1], [0, 1, -1]], 8, 4), 8, 8),
        (BlockSparse([[0], [5]], 8, 8), 12, 4),
        (Dilated(1), 0, 16),
        (Dilated(16), 12, 0),
        (~Causal(), 6, 6),
        (Predicate(lambda b, n, i, j: i == j), 12, 0),
    ],
)
def test_tiles_are_static_for_masks_without_arrays(mask: Mask, empty: int, full: int) -> None:
    """The number of 4 × 4 tiles of 16 × 16 scores that need no work, or no mask."""
    dims = Dims((), 16, 16, 1, 1, 1, 1)
    verdict = verdicts(mask, dims, 4, 4)
    assert isinstance(verdict, np.ndarray | np.generic)
    verdict = np.broadcast_to(verdict, (1, 4, 4))
    assert ((verdict == EMPTY).sum(), (verdict == FULL).sum()) == (empty, full)


def test_dense_and_show_draw_the_mask() -> None:
    np.testing.assert_array_equal(Causal().dense(3)[0], np.tri(3, dtype=bool))
    counted = "41.7% of pairs may attend, and every query has a key"
    assert Window(1, 0).show(3, 4) == f"█···\n██··\n·██·\n{counted}"
    above = Causal().show(2, 4, q_positions=-1)
    assert above == "····\n█···\n12.5% of pairs may attend, and 1 query has no key"
    batched = Causal() & Lengths(np.array([2, 1]))
    assert batched.dense(3, batch=(2,)).shape == (2, 1, 3, 3)
    with pytest.raises(ValueError, match=r"got \(2,\); give one length"):
        batched.show(3)
    # Bottom-right causality, and a step of a ring cache with positions for each row.
    assert Causal().show(2, 4, q_positions=2).startswith("███·\n████\n")
    assert Causal().show(2, 4, kv_positions=np.array([0, 9, 1, 0])).startswith("█··█\n█·██\n")
    at = np.array([[5], [2]])
    found = Window(2, 0).dense(1, 4, (2,), q_positions=at, kv_positions=[4, 1, 2, 3])
    distance = at[:, None, :, None] - np.array([4, 1, 2, 3])
    np.testing.assert_array_equal(found, (distance >= 0) & (distance <= 2))


@pytest.mark.parametrize("answer", [True, np.bool_(False)], ids=repr)
def test_predicate_may_return_one_bool_for_all_pairs(answer: bool) -> None:
    rule, causal = Predicate(lambda *_: answer), np.tri(3, dtype=bool)
    for mask, same in ((rule, answer), (~rule, not answer), (rule & Causal(), answer & causal)):
        np.testing.assert_array_equal(mask.dense(3)[0], np.broadcast_to(same, (3, 3)))
    q = jax.ShapeDtypeStruct((1, 3, 2, 4), jnp.float32)
    for kernel in ("reference", "blockwise"):
        attend = partial(dot_product_attention, mask=rule & Causal(), kernel=kernel)
        assert jax.eval_shape(attend, q, q, q).shape == q.shape


@pytest.mark.parametrize("array", [TABLE, jnp.asarray(TABLE)], ids=["numpy", "jax"])
def test_arrays_combine_with_masks_on_either_side(array: np.ndarray | jax.Array) -> None:
    causal = table(Causal())
    for both in (array & Causal(), Causal() & array):
        np.testing.assert_array_equal(table(both), causal & TABLE)
    for either in (array | Causal(), Causal() | array):
        np.testing.assert_array_equal(table(either), causal | TABLE)


def test_masks_pass_through_transformations() -> None:
    mask = Causal() & Lengths(jnp.asarray(KV))
    np.testing.assert_array_equal(jax.jit(table)(mask), table(mask))
    leaves, tree = jax.tree.flatten(mask)
    assert len(leaves) == 1
    assert jax.tree.unflatten(tree, leaves).masks[0] == Causal()

    dims = Dims((), T, S, N, N, 4, 4)
    rows = jax.vmap(lambda n: table(Lengths(n), dims))(jnp.asarray(KV))
    np.testing.assert_array_equal(rows, table(Lengths(KV)))


@pytest.mark.parametrize("kind", [int, np.int64, np.array, jnp.int32, jnp.array])
def test_one_position_is_the_first(kind: Callable[..., Any]) -> None:
    for first in (0, 7):
        found = Causal().dense(2, 10, q_positions=kind(first))
        np.testing.assert_array_equal(found[0], np.tri(2, 10, first, dtype=bool))
    traced = jax.jit(lambda first: Causal().dense(2, 10, q_positions=first))(jnp.asarray(7))
    np.testing.assert_array_equal(traced[0], np.tri(2, 10, 7, dtype=bool))


@pytest.mark.parametrize(
    ("batch", "shape", "other"),
    [
        ((4,), (4, 4), r"read as \[T, S\].*write masks.Keys\(mask\) for these, or mask\[None\]"),
        ((4,), (4, 6), r"read as \[T, S\]"),
        ((3,), (3, 4, 6), r"read as \[N, T, S\].*write mask\[\.\.\., None, :, :\] for these"),
        ((3, 4), (3, 4, 6), r"read as \[N, T, S\].*write masks.Keys"),
        ((2,), (4, 6), None),
        ((4,), (1, 4, 6), None),
        ((4,), (1, 3, 4, 6), None),
        ((1,), (1, 6), None),
        ((1,), (4, 6), None),
        ((), (4, 6), None),
        ((3,), (3, 1, 4, 6), None),
    ],
)
def test_ambiguous_mask_shapes_warn(batch, shape, other) -> None:
    """NumPy broadcasting holds. A warning names the other reading of the same shape."""
    dims = Dims(batch, 4, shape[-1], 3, 3, 4, 4)
    mask = np.random.default_rng(0).random(shape) < 0.5
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = table(Dense(mask), dims)
    np.testing.assert_array_equal(found, np.broadcast_to(mask, dims.logits))
    assert [re.search(other, str(w.message)) is not None for w in caught] == [True] * bool(other)
    if other:
        # The suggested spelling gives no warning and means the same.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            np.testing.assert_array_equal(table(Dense(mask[None]), dims), found)


def test_user_defined_mask() -> None:
    class Even(Mask):
        def allowed(self, at: At) -> jax.Array:
            return (at.q + at.k) % 2 == 0

    even = (np.arange(T)[:, None] + np.arange(S)) % 2 == 0
    np.testing.assert_array_equal(table(Even() & Causal()), np.asarray(table(Causal())) & even)
    with pytest.raises(NotImplementedError):
        table(type("Forgetful", (Mask,), {})())


def test_masks_without_arrays_are_hashable() -> None:
    """Hashable masks can be static fields of modules that nn.jit hashes."""
    assert hash(Causal() & ~Causal()) == hash(Causal() & ~Causal())
    assert Causal() & Causal() != Causal() | Causal()


@pytest.mark.sampled(0.2)
def test_masks_of_heads_vary_alike_inside_shard_map() -> None:
    """A rule of positions is the same on all devices, and a table is each one's own."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(2, 300, 2, 8)), jnp.float32)
    tables = jnp.asarray(rng.random((2, 300, 300)) < 0.5)

    def attend(q: jax.Array, table: jax.Array) -> jax.Array:
        mask = masks.PerHead([masks.Causal(), masks.Dense(table[0])])
        return dot_product_attention(q, q, q, mask=mask, kernel="checkpointed")

    def loss(attend: Any, q: jax.Array) -> jax.Array:
        return (attend(q, tables) ** 2).sum()

    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=P("x"), out_specs=P("x"))

    def alone(q: jax.Array, tables: jax.Array) -> jax.Array:
        return jnp.concatenate([attend(q[i : i + 1], tables[i : i + 1]) for i in range(2)])

    for gradient in (jax.jit(jax.grad(loss, 1), static_argnums=0), loss):
        found, wanted = gradient(jax.jit(sharded), q), gradient(alone, q)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MASKS)
def test_full_and_empty_tiles_are_so(name: str) -> None:
    """A tile marked empty allows no pair, and a full one allows all."""
    for seed in range(8):
        scene, dims = Scene((B,), 12, 12, seed=seed, N=N), DIMS._replace(T=12, S=12)
        mask, allowed = MASKS[name](scene)
        verdict = np.broadcast_to(np.asarray(verdicts(mask, dims, 3, 4)), (B, N, 4, 3))
        pairs = scene.table(allowed).reshape(B, N, 4, 3, 3, 4).swapaxes(-2, -3)
        assert pairs[verdict == FULL].all(), seed
        assert not pairs[verdict == EMPTY].any(), seed


def test_runs_beyond_the_most_are_fully_masked() -> None:
    ids = np.array([[5, 5, 2, 2, 7, 7]])
    dims = Dims((1,), 6, 6, N, N, 4, 4)
    seen = jax.jit(lambda ids: Segments(ids, runs=True, at_most=2).bind(dims).allowed(whole(dims)))
    expected = (ids[0][:, None] == ids[0]) & (np.arange(6) < 4)
    np.testing.assert_array_equal(np.broadcast_to(seen(ids), dims.logits)[0, 0], expected)
    documents = resolve(Documents(np.array([[2, 3, 1]])).bind(dims), whole(dims))
    assert documents.at_most == 3


@pytest.mark.parametrize("query_block", [2, 4])
def test_top_blocks_are_the_own_one_and_the_best_earlier_one(query_block: int) -> None:
    T, key_block = 24, 4
    block_scores = np.random.default_rng(0).normal(size=(1, N, T // query_block, T // key_block))
    chosen = masks.top_blocks(
        block_scores.astype(np.float32), 2, query_block=query_block, key_block=key_block
    )
    expected = np.zeros((1, N, T, T), bool)
    for head, i in np.ndindex(N, T):
        own = i // key_block
        seen = [own]
        if own:
            seen.append(block_scores[0, head, i // query_block, :own].argmax())
        for block in seen:
            expected[0, head, i, block * key_block : (block + 1) * key_block] = True
    expected &= np.tri(T, dtype=bool)
    np.testing.assert_array_equal(table(chosen, Dims((1,), T, T, N, N, 4, 4)), expected)
