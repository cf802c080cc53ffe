"""Every kernel on every covered case, forward and every gradient, against the float64 oracle."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from flax_mha import dot_product_attention, explain
from tests import oracle
from tests.kernels import cases
from tests.kernels.cases import KERNELS, Case
from tests.kernels.problems import Problem, problem_of

# Forward and gradients, relative to the norm: what no kernel is asked to be better than, and
# what the reference kernel must reach. Half precision: the inputs' rounding, passed on.
FLOOR = (2e-6, 1e-5)
REFERENCE = {"float32": FLOOR, "bfloat16": (1e-2, 3e-2), "float16": (1.5e-3, 4e-3)}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The grid's cases are made only where a marker expression asks for them."""
    if "case" not in metafunc.fixturenames:
        return
    found = [(case, kernel, ()) for case in cases.ordinary() for kernel in KERNELS]
    if "grid" in metafunc.config.option.markexpr:
        marks = (pytest.mark.grid,)
        found += [(case, kernel, marks) for case in cases.grid() for kernel in KERNELS]
    metafunc.parametrize(
        ("case", "kernel"),
        [pytest.param(case, kernel, marks=m, id=f"{case}-{kernel}") for case, kernel, m in found],
    )


def run(kernel: str, problem: Problem, traced: bool) -> dict[str, np.ndarray]:
    """What a kernel makes of a problem, by the names of the truth."""

    def attend(qkv: Any, learned: Any, given: Any) -> Any:
        mask, q_positions, kv_positions = given
        return dot_product_attention(
            *qkv, mask=mask, q_positions=q_positions, kv_positions=kv_positions, kernel=kernel,
            return_residuals=True, **problem.call(learned),
        )  # fmt: skip

    @jax.jit
    def both(qkv: Any, learned: Any, given: Any) -> Any:
        given = problem.given if given is None else given
        results, pull = jax.vjp(lambda *x: attend(*x, given), qkv, learned)
        return results, pull(problem.cotangents)

    given = problem.given if traced else None
    (out, lse), (dqkv, dlearned) = both(problem.qkv, problem.learned, given)
    assert out.dtype == problem.qkv[0].dtype
    named = dict(zip("qkv", dqkv, strict=True)) | dlearned
    return {"out": out, "lse": lse} | named


def errors(problem: Problem, got: dict[str, np.ndarray]) -> dict[str, float]:
    """How far each result is from the truth."""
    seen = np.isfinite(problem.truth["lse"])
    np.testing.assert_array_equal(np.isneginf(got["lse"]), ~seen)
    pairs = {name: (np.asarray(got[name]), want) for name, want in problem.truth.items()}
    pairs["lse"] = tuple(x[seen] for x in pairs["lse"])
    return {name: oracle.error(*pair) for name, pair in pairs.items()}


@functools.lru_cache(maxsize=4)
def reference_errors(case: Case) -> dict[str, float]:
    problem = problem_of(case)
    return errors(problem, run("reference", problem, case.given == "traced"))


def bounds(case: Case, kernel: str) -> dict[str, float]:
    """The errors allowed: twice those of the reference kernel, or the floor."""
    floors = {name: FLOOR[name not in ("out", "lse")] for name in problem_of(case).truth}
    if kernel == "reference":
        forward, backward = REFERENCE[case.dtype]
        return {name: forward if name in ("out", "lse") else backward for name in floors}
    return {name: max(floor, 2 * reference_errors(case)[name]) for name, floor in floors.items()}


def test_against_the_oracle(case: Case, kernel: str) -> None:
    problem = problem_of(case)
    mask, q_positions, kv_positions = problem.given
    refused = explain(
        *problem.qkv, mask=mask, q_positions=q_positions, kv_positions=kv_positions,
        kernel=kernel, **problem.call(problem.learned),
    ).refused  # fmt: skip
    if kernel in refused:
        pytest.skip(f"{kernel} refuses: {refused[kernel]}")
    if kernel == "reference":
        found = reference_errors(case)
    else:
        found = errors(problem, run(kernel, problem, case.given == "traced"))
    allowed = bounds(case, kernel)
    beyond = {
        name: (found[name], allowed[name]) for name in found if not found[name] <= allowed[name]
    }
    assert not beyond, f"errors beyond their bounds: {beyond}"


@pytest.mark.parametrize(("strength", "some"), [(2, cases.ordinary), (3, cases.grid)])
def test_cases_cover_all_combinations(strength: int, some: Any) -> None:
    """Pairs in the ordinary suite, triples together with the grid."""
    missing = cases.all_tuples(cases.FACTORS, strength)
    for case in {*cases.ordinary(), *some()}:
        missing.difference_update(cases.tuples_of(case, strength))
    assert not missing


def test_there_are_enough_cases() -> None:
    assert len(set(cases.ordinary())) * len(KERNELS) >= 500
    assert len(set(cases.grid())) * len(KERNELS) >= 2000
