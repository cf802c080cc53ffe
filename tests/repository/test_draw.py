"""All cases of sampled tests have their turn within 30 days, and a seed repeats a day."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest

from tests import conftest
from tests.support.draw import DAYS, draw

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("seed", [0, 20418])
@pytest.mark.parametrize(("count", "share", "slow"), [
    (1, 0, 0.3), (1, 0.34, 0.15), (2, 0.34, 0), (7, 0.5, 0.3), (10, 1, 0.3), (60, 0, 0.3),
    (59, 0, 0), (61, 0.02, 0), (6574, 0.002, 0),
])  # fmt: skip
def test_a_month_draws_every_case(count: int, share: float, slow: float, seed: int) -> None:
    cases, drawn = [*range(count)], set[int]()
    for day in range(DAYS):
        fast, more = draw(cases, share, slow, seed + day, "test_x")
        assert not {*fast} & {*more}
        assert abs(len(fast) - share * count) <= 1
        drawn |= {*fast, *more}
    assert drawn == {*cases}


def test_shares_are_exact_on_average() -> None:
    for count, share in (1, 0.34), (4, 0.1), (7, 0.5), (3, 1):
        runs = [draw([*range(count)], share, 0.15, day, "test_x") for day in range(1000)]
        assert abs(sum(len(fast) for fast, _ in runs) - 1000 * share * count) < 10
        assert sum(len(more) for _, more in runs) < 1000 * (1 - share) * count * 0.15 + 10


def test_a_seed_repeats_a_draw() -> None:
    cases = [*range(40)]
    assert draw(cases, 0.1, 0.3, 7, "test_x") == draw(cases, 0.1, 0.3, 7, "test_x")
    for other in (7, "test_y"), (8, "test_x"):
        assert draw(cases, 0.1, 0.3, *other)[0] != draw(cases, 0.1, 0.3, 7, "test_x")[0]
    # All run each day: the fast ones are others.
    assert draw(cases, 0.5, 1, 7, "test_x")[0] != draw(cases, 0.5, 1, 8, "test_x")[0]


def test_a_draw_is_spread_over_the_factors() -> None:
    factors = ("abcd", "efghi", "jkl")
    for day in range(DAYS):
        fast, more = draw([*itertools.product(*factors)], 0.4, 0.15, day, "test_x")
        for column, values in zip(zip(*fast, *more, strict=True), factors, strict=True):
            assert {*column} == {*values}, day


def test_examples_follow_the_draw(request: pytest.FixtureRequest) -> None:
    given = str(request.config.option.hypothesis_seed)
    assert str(hypothesis.core.global_force_seed) == given
    if "--hypothesis-seed" not in " ".join(request.config.invocation_params.args):
        assert given == os.environ["TEST_DRAW"]
    assert not hypothesis.settings.default.derandomize
    assert hypothesis.settings.default.database is None


def test_failures_say_how_to_repeat_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_DRAW", "20418")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")
    lines: list[str] = []
    failed = [SimpleNamespace(nodeid="tests/test_x.py::test_y[a b]")]
    reporter = SimpleNamespace(
        stats={"failed": failed}, section=lines.append, write_line=lines.append
    )
    conftest.pytest_terminal_summary(reporter)
    assert lines[1:] == [
        "TEST_DRAW=20418 JAX_DISABLE_MOST_OPTIMIZATIONS=0 "
        "python -m pytest -n 0 -m '' 'tests/test_x.py::test_y[a b]'"
    ]
    lines.clear()
    reporter.stats = {"passed": failed}
    conftest.pytest_terminal_summary(reporter)
    assert not lines


@pytest.mark.slow
def test_runs_draw_by_the_environment() -> None:
    def collected(draw: int, *flags: str, of: str = "") -> set[str]:
        command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--collect-only", *flags]
        run = subprocess.run(
            [*command, "tests/kernels/test_debug_nans.py" + of], cwd=ROOT, check=True, text=True,
            capture_output=True, env={**os.environ, "TEST_DRAW": str(draw)},
        )  # fmt: skip
        return {line for line in run.stdout.splitlines() if "::" in line}

    first, every = collected(1), collected(1, "-m", "grid or not grid")
    assert first < every
    assert first != collected(2)
    # A test that is named runs, drawn or not.
    assert len(collected(1, "-m", "", of="::" + min(every - first).split("::")[1])) == 1
