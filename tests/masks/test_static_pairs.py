"""Tiles of masks that have none of their own, from the pairs that they allow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flax_mha import dot_product_attention
from flax_mha.base.shapes import Dims
from flax_mha.kernels import bind_call
from flax_mha.kernels.xla.tile_plan import Plan, tile_states
from flax_mha.masks import EMPTY, FULL, PARTIAL, Causal, Mask, Predicate, algebra
from tests.support.oracle import error

T, S = 40, 56
DIMS = Dims((2,), T, S, 2, 2, 8, 8)


def states(mask: Mask, block: int = 8, **call) -> np.ndarray:
    x = np.zeros((2, T, 2, 8), np.float32), np.zeros((2, S, 2, 8), np.float32)
    *_, spec = bind_call(x[0], x[1], x[1], mask=mask, **call)
    return tile_states(spec, spec.at(DIMS), Plan(DIMS, block, block))


def blocked(size: int, step: int):
    return lambda row, head, i, j: (i // size >= j // size) & ((i - j) % step < step // 2 + 1)


@given(
    st.integers(1, 20), st.integers(1, 30), st.integers(1, 17), st.integers(-9, 9),
    st.booleans(),
)  # fmt: skip
def test_states_are_those_of_the_table(
    size: int, step: int, block: int, first: int, inverted: bool
) -> None:
    mask: Mask = Predicate(blocked(size, step))
    mask = ~mask if inverted else mask
    table = np.asarray(mask.dense(T, S, q_positions=first))[0]
    found = states(mask, block, q_positions=first)
    np.testing.assert_array_equal(found, states(table, block))
    assert found.shape[:2] == (1, 1)


class Striped(Mask):
    """A mask of a user."""

    step: int

    def allowed(self, at):
        return jnp.abs(at.q - at.k) // self.step % 2 == 0


def test_masks_of_users_are_evaluated_too() -> None:
    assert set(np.unique(states(Striped(16)))) == {EMPTY, PARTIAL, FULL}
    both = states(Striped(16) & Causal())
    assert (both[0, 0, 0, 1:] == EMPTY).all()


@pytest.mark.parametrize(
    "fn",
    [lambda row, head, i, j: j <= i + row, lambda row, head, i, j: j <= i - head],
    ids=["row", "head"],
)
def test_functions_of_rows_or_heads_are_partial(fn) -> None:
    assert (states(Predicate(fn)) == PARTIAL).all()


def test_traced_values_are_partial() -> None:
    found = []

    @jax.jit
    def call(width, positions):
        known = Predicate(lambda row, head, i, j: j < 8)
        found.append(states(Predicate(lambda row, head, i, j, n: j < n, (width,))))
        found.append(states(known, q_positions=positions))
        found.append(states(known))
        return width

    call(9, jnp.arange(T))
    assert all((np.asarray(x) == PARTIAL).all() for x in found[:2])
    assert set(np.unique(found[2])) == {EMPTY, FULL}


def test_too_many_pairs_are_partial(monkeypatch) -> None:
    monkeypatch.setattr(algebra, "MOST", T * S - 1)
    assert (states(Predicate(blocked(8, 4))) == PARTIAL).all()


def test_arrays_of_jitted_functions_are_read() -> None:
    def seen(table: np.ndarray) -> np.ndarray:
        inner = jax.jit(lambda j: jnp.asarray(table)[j])
        return states(Predicate(lambda row, head, i, j: inner(j)))

    table = np.arange(64) < 8
    np.testing.assert_array_equal(seen(table), FULL - seen(~table))


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("kernel", ["blockwise", "checkpointed"])
def test_skipped_tiles_change_nothing(kernel: str, monkeypatch) -> None:
    mask = Predicate(lambda row, head, i, j: (i // 64 == j // 64) | (j // 64 < i // 64 - 3))
    q = np.random.default_rng(0).normal(size=(1, 600, 2, 8)).astype(np.float32)

    def loss(q):
        return jnp.sin(dot_product_attention(q, q, q, mask=mask, kernel=kernel)).sum()

    skipped = jax.jit(jax.grad(loss))(q)
    monkeypatch.setattr(algebra, "MOST", 0)
    jax.clear_caches()  # Kernels share traces between calls.
    assert error(skipped, jax.jit(jax.grad(loss))(q)) < 1e-5
