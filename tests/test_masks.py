"""Masks against their definitions, written out pair by pair."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flax_mha import masks
from flax_mha.kernels.spec import place_keys, place_queries
from flax_mha.masks import Causal, Dense, Lengths, Mask
from flax_mha.shapes import Dims

B, N, T, S = 2, 3, 5, 6
DIMS = Dims((B,), T, S, N, N, 4, 4)
Rule = Callable[[int, int, int, int], bool]

KV = np.array([3, 0])
KV_PER_QUERY = np.array([[1, 2, 3, 4, 6], [0, 6, 2, 2, 1]])
Q = np.array([4, 5])
TABLE = np.random.default_rng(0).random((B, N, T, S)) < 0.5

ATOMS: dict[str, tuple[Mask, Rule]] = {
    "causal": (Causal(), lambda b, n, i, j: j <= i),
    "lengths": (Lengths(KV), lambda b, n, i, j: j < KV[b]),
    "lengths_per_query": (Lengths(KV_PER_QUERY), lambda b, n, i, j: j < KV_PER_QUERY[b, i]),
    "lengths_of_both": (Lengths(KV, q=Q), lambda b, n, i, j: j < KV[b] and i < Q[b]),
    "dense": (Dense(TABLE), lambda b, n, i, j: TABLE[b, n, i, j]),
    "dense_of_keys": (Dense(TABLE[:, :1, :1]), lambda b, n, i, j: TABLE[b, 0, 0, j]),
    "dense_without_batch": (Dense(TABLE[0, 0]), lambda b, n, i, j: TABLE[0, 0, i, j]),
}


def table(mask: Mask, dims: Dims = DIMS) -> np.ndarray:
    allowed = mask.bind(dims).allowed(place_queries(None, dims), place_keys(None, dims))
    return np.broadcast_to(allowed, dims.logits)


def definition(rule: Rule) -> np.ndarray:
    return np.array(
        [
            [[[rule(b, n, i, j) for j in range(S)] for i in range(T)] for n in range(N)]
            for b in range(B)
        ]
    )


@pytest.mark.parametrize("name", ATOMS)
def test_definition(name: str) -> None:
    mask, rule = ATOMS[name]
    np.testing.assert_array_equal(table(mask), definition(rule))


expressions = st.recursive(
    st.sampled_from(sorted(ATOMS)),
    lambda inner: st.one_of(
        st.tuples(st.just("~"), inner), st.tuples(st.sampled_from("&|"), inner, inner)
    ),
    max_leaves=6,
)


def evaluate(expression: str | tuple) -> tuple[Mask, Rule]:
    """The mask an expression builds with operators, and its meaning in Python's logic."""
    if isinstance(expression, str):
        return ATOMS[expression]
    operator, *operands = expression
    (mask, rule), *rest = map(evaluate, operands)
    if operator == "~":
        return ~mask, lambda *at: not rule(*at)
    other, other_rule = rest[0]
    if operator == "&":
        return mask & other, lambda *at: rule(*at) and other_rule(*at)
    return mask | other, lambda *at: rule(*at) or other_rule(*at)


@given(expressions)
def test_algebra(expression: str | tuple) -> None:
    mask, rule = evaluate(expression)
    np.testing.assert_array_equal(table(mask), definition(rule))


@pytest.mark.parametrize("array", [TABLE, jnp.asarray(TABLE)], ids=["numpy", "jax"])
def test_arrays_join_the_algebra_on_either_side(array: np.ndarray | jax.Array) -> None:
    causal = table(Causal())
    np.testing.assert_array_equal(table(array & Causal()), causal & TABLE)
    np.testing.assert_array_equal(table(Causal() & array), causal & TABLE)
    np.testing.assert_array_equal(table(array | Causal()), causal | TABLE)
    np.testing.assert_array_equal(table(Causal() | array), causal | TABLE)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_any_number_of_batch_dimensions(batch: tuple[int, ...]) -> None:
    dims = Dims(batch, T, S, N, N, 4, 4)
    lengths = np.arange(np.prod(batch, dtype=int)).reshape(batch) % S
    expected = np.arange(S) < lengths[..., None, None, None]
    np.testing.assert_array_equal(
        table(Lengths(lengths), dims), np.broadcast_to(expected, dims.logits)
    )


def test_masks_pass_through_transformations() -> None:
    mask = Causal() & Lengths(jnp.asarray(KV))
    np.testing.assert_array_equal(jax.jit(table_of)(mask), table(mask))
    leaves, tree = jax.tree.flatten(mask)
    assert len(leaves) == 1
    assert jax.tree.unflatten(tree, leaves).masks[0] == Causal()

    dims = Dims((), T, S, N, N, 4, 4)
    rows = jax.vmap(lambda n: table_of(Lengths(n), dims))(jnp.asarray(KV))
    np.testing.assert_array_equal(rows, table(Lengths(KV)))


def table_of(mask: Mask, dims: Dims = DIMS) -> jax.Array:
    allowed = mask.bind(dims).allowed(place_queries(None, dims), place_keys(None, dims))
    return jnp.broadcast_to(allowed, dims.logits)


def test_positions_shift_the_meaning() -> None:
    """Queries at positions 7 and 8 see the keys up to there."""
    dims = Dims((), 2, 10, 1, 1, 4, 4)
    allowed = Causal().allowed(place_queries(jnp.array([7, 8]), dims), place_keys(None, dims))
    np.testing.assert_array_equal(allowed[0].sum(-1), [8, 9])


def test_combine() -> None:
    assert masks.combine(None, None) is None
    assert masks.combine(None, Causal()) == Causal()
    both = masks.combine(Causal(), None, TABLE)
    assert both is not None
    np.testing.assert_array_equal(table(both), table(Causal()) & TABLE)


def test_a_mask_of_ones_own() -> None:
    class Even(Mask):
        def allowed(self, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
            return (q_pos + k_pos) % 2 == 0

    np.testing.assert_array_equal(
        table(Even() & Causal()), definition(lambda b, n, i, j: (i + j) % 2 == 0 and j <= i)
    )
    with pytest.raises(NotImplementedError, match=r"Forgetful must define allowed"):
        table(type("Forgetful", (Mask,), {})())


def test_masks_without_arrays_are_hashable() -> None:
    """They can be static fields of modules that nn.jit hashes."""
    assert hash(Causal() & ~Causal()) == hash(Causal() & ~Causal())
    assert Causal() & Causal() != Causal() | Causal()
