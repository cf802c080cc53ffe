"""All cases of sampled tests have their turn within `DAYS` days, and a seed repeats a day."""

import hypothesis
import pytest

from tests.support.draw import DAYS, draw


@pytest.mark.parametrize("seed", [0, 20418])
@pytest.mark.parametrize(("count", "share"), [
    (1, 0), (1, 0.34), (2, 0.34), (7, 0.5), (10, 1), (59, 0), (61, 0.02), (6574, 0.002),
])  # fmt: skip
def test_all_days_draw_every_case(count: int, share: float, seed: int) -> None:
    cases, drawn = [*range(count)], set[int]()
    for day in range(DAYS):
        fast, more = draw(cases, share, seed + day, "test_x")
        assert not {*fast} & {*more}
        assert abs(len(fast) - share * count) <= 1
        drawn |= {*fast, *more}
    assert drawn == {*cases}


def test_a_seed_repeats_a_draw() -> None:
    cases = [*range(40)]
    first = draw(cases, 0.1, 7, "test_x")
    assert first == draw(cases, 0.1, 7, "test_x")
    for other in (7, "test_y"), (8, "test_x"):
        assert draw(cases, 0.1, *other)[0] != first[0]


def test_examples_of_hypothesis_follow_the_draw(request: pytest.FixtureRequest) -> None:
    seed = str(request.config.option.hypothesis_seed)
    assert str(hypothesis.core.global_force_seed) == seed
    assert not hypothesis.settings.default.derandomize
    assert hypothesis.settings.default.database is None
