"""Kernels under masks that nobody chose: random combinations, lengths and places."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flax_mha import dot_product_attention
from flax_mha.masks import Documents
from tests.kernels.cases import KERNELS, Case
from tests.kernels.problems import Problem, pose
from tests.kernels.scenes import MASKS, Scene
from tests.kernels.test_contract import bounds, errors, run
from tests.support.algebra import Expression, evaluate, expressions

LENGTHS = st.integers(1, 300)


# Each example compiles: to shrink one would take minutes, and there are few to read.
@pytest.mark.slow
@settings(max_examples=12, phases=[Phase.generate])
@given(
    expressions(MASKS),
    LENGTHS,
    LENGTHS,
    st.sampled_from(["from_0", "aligned", "scattered"]),
    st.sampled_from(["known", "traced"]),
    st.sampled_from(["plain", "all_scores"]),
    st.integers(0, 2**32 - 1),
)
def test_random_masks(
    expression: Expression, T: int, S: int, place: str, given: str, score: str, seed: int
) -> None:
    at = Scene((2,), T, S, place, seed)
    case = Case("random", "", score, "soft", "gqa", "float32", "no_dropout", place, given)
    mask, allowed = evaluate(expression, lambda name: _whole(at, name))
    problem = pose(at, mask, allowed, case)
    allowed_errors = bounds(problem)
    for kernel in KERNELS:
        for name, error in errors(problem, run(kernel, problem, given == "traced")).items():
            assert error <= allowed_errors[name], (kernel, name, error)


def _whole(at: Scene, name: str) -> tuple:
    mask, allowed = MASKS[name](at)
    return mask, at.table(allowed)


@functools.cache
def _posed(name: str) -> tuple[Problem, dict[str, float]]:
    """A mask's problem, which is the same known and traced, and the errors allowed."""
    case = Case(name, "", "bias", "soft", "gqa", "float32", "no_dropout", "from_0", "known")
    at = Scene((2,), 257, 300, "from_0", 5)
    problem = pose(at, *_whole(at, name), case)
    return problem, bounds(problem)


ORDINARY = {"dilated": "known", "neighborhood": "traced", "documents": "known", "chosen": "traced"}
LATTICES = [
    pytest.param(name, given_as, marks=() if given_as == ordinary else pytest.mark.slow)
    for name, ordinary in ORDINARY.items()
    for given_as in ("known", "traced")
]


@pytest.mark.parametrize(("name", "given_as"), LATTICES)
def test_masks_on_lattices(name: str, given_as: str) -> None:
    """Skipping tiles that they exclude, and in all that is left."""
    problem, allowed = _posed(name)
    for kernel in KERNELS:
        for part, error in errors(problem, run(kernel, problem, given_as == "traced")).items():
            assert error <= allowed[part], (kernel, part, error)


@pytest.mark.parametrize("lengths", [[3, 2], [[3, 2], [1, 4]]])
def test_documents_go_by_position(lengths: Any) -> None:
    """Of the last two tokens alone, as in decoding, and of tokens in another order."""
    q, k, v = (np.random.default_rng(n).normal(size=(2, 7, 2, 4)) for n in range(3))
    q, k, v = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    mask = Documents(jnp.asarray(lengths))
    wanted = dot_product_attention(q, k, v, mask=mask)
    last = dot_product_attention(q[:, 5:], k, v, mask=mask, q_positions=5)
    np.testing.assert_allclose(last, wanted[:, 5:], atol=1e-6)
    order = np.array([4, 0, 6, 2, 5, 1, 3])
    q, k, v = (x[:, order] for x in (q, k, v))
    found = dot_product_attention(q, k, v, mask=mask, q_positions=order, kv_positions=order)
    np.testing.assert_allclose(found, wanted[:, order], atol=1e-6)
