"""Kernels under masks that nobody chose: random combinations, lengths and places."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.algebra import Expression, evaluate, expressions
from tests.kernels.cases import KERNELS, Case
from tests.kernels.problems import pose
from tests.kernels.scenes import MASKS, Scene
from tests.kernels.test_contract import bounds, errors, run

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


@pytest.mark.parametrize("given_as", ["known", "traced"])
@pytest.mark.parametrize("name", ["dilated", "neighborhood", "documents"])
def test_masks_on_lattices(name: str, given_as: str) -> None:
    """Skipping tiles that they exclude, and in all that is left."""
    case = Case(name, "", "bias", "soft", "gqa", "float32", "no_dropout", "from_0", given_as)
    at = Scene((2,), 257, 300, "from_0", 5)
    problem = pose(at, *_whole(at, name), case)
    allowed = bounds(problem)
    for kernel in KERNELS:
        for part, error in errors(problem, run(kernel, problem, given_as == "traced")).items():
            assert error <= allowed[part], (kernel, part, error)
