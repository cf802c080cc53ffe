"""Every kernel against the float64 oracle, forward and every gradient, on cases that take turns."""

from typing import Any

import jax
import numpy as np
import pytest

from flax_mha import Explanation, dot_product_attention, explain
from tests.kernels import cases
from tests.kernels.cases import KERNELS, Case
from tests.kernels.problems import Problem, exact, problem_of
from tests.support import oracle, plain_attention

# Kernels that run here interpreted, or on a model of cuDNN, with the fixture for each.
# A kernel for several platforms has a name for each. The first word is the kernel's own.
PLATFORMS = {
    "flex": "tpu",
    "flex on Hopper": "hopper_memory",
    "splash": "tpu",
    "short": "tpu",
    "cudnn": "nvidia",
}
EVERY = (*KERNELS, "decode", *PLATFORMS)
# A GPU day has the time for each third of the ordinary cases.
THIRD = 3
# The interpreter for Hopper calls Python for each access to memory, so that its time grows with
# rows and tiles. It gets fewer tiles: still several, full, partial and empty ones.
SMALLER = {"2x257x257": "2x129x257", "1x600x600": "1x129x257"}
# Relative to the norm: what no kernel is asked to be better than. In half precision no gradient,
# though it be float32 as that of a bias, need be better than half a unit in the last place; in
# float16, where gradients of small weights have few digits left, than a unit.
FLOOR = 2e-6
GRADIENTS = {"float32": 1e-5, "bfloat16": 2**-8, "float16": 2**-10}
# Nor better than this part of its size before terms of both signs cancelled: where all weight is
# on one key, nothing but rounding is left of the gradients of q and k.
CANCELLED = 1e-6


def _cases() -> list[Any]:
    """Return each case for each kernel; `grid` marks those that a GPU day leaves out.

    The rows for triples are for kernels that run here as they are, not interpreted.
    """
    rows = [
        (case, kernel, n % THIRD > 0) for n, case in enumerate(cases.ordinary()) for kernel in EVERY
    ]
    rows += [(case, kernel, True) for case in cases.grid() for kernel in KERNELS]
    found = []
    for case, kernel, beyond in rows:
        # Too long for the fast tests, which have a case of their own for it.
        marks = [pytest.mark.slow] if kernel == "flex on Hopper" else []
        marks += [pytest.mark.grid] if beyond else []
        found.append(pytest.param(case, kernel, marks=marks, id=f"{case}-{kernel}"))
    return found


def run(kernel: str, problem: Problem, traced: bool) -> dict[str, np.ndarray]:
    """Return a kernel's results for a problem, by the names of the truth."""

    def attend(qkv: Any, learned: Any, given: Any) -> Any:
        mask, q_positions, kv_positions = given
        return dot_product_attention(
            *qkv, mask=mask, q_positions=q_positions, kv_positions=kv_positions,
            kernel=kernel.split()[0], return_residuals=True, **problem.call(learned),
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
    """Return the error of each result."""
    seen = np.isfinite(problem.truth["lse"])
    np.testing.assert_array_equal(np.isneginf(got["lse"]), ~seen)
    pairs = {name: (np.asarray(got[name]), want) for name, want in problem.truth.items()}
    pairs["lse"] = tuple(x[seen] for x in pairs["lse"])
    return {name: oracle.error(*pair) for name, pair in pairs.items()}


def bounds(problem: Problem, as_cudnn: bool = False) -> dict[str, float]:
    """Return the allowed errors: twice the errors of plain attention in the same dtype, or the
    floor. A bound `as_cudnn` allows for the mean of a rounded output.
    """
    more = [problem.as_cudnn] if as_cudnn else []
    plain = [errors(problem, found) for found in problem.plain + more]
    allowed = {name: max(FLOOR, *(2 * error[name] for error in plain)) for name in plain[0]}
    least = GRADIENTS[problem.qkv[0].dtype.name]
    for name, size in problem.sizes.items():
        whole = float(np.linalg.norm(problem.truth[name])) or 1.0
        allowed[name] = max(allowed[name], least, CANCELLED * size / whole)
    return allowed


def refusal(kernel: str, problem: Problem, traced: bool) -> str | None:
    """Return the reason why the kernel refuses the problem, or None."""
    found: list[Explanation] = []

    def ask(given: Any) -> None:
        mask, q_positions, kv_positions = given
        told = explain(
            *problem.qkv, mask=mask, q_positions=q_positions, kv_positions=kv_positions,
            kernel=kernel.split()[0], return_residuals=True, **problem.call(problem.learned),
        )  # fmt: skip
        found.append(told)

    if traced:
        jax.eval_shape(ask, problem.given)
    else:
        ask(problem.given)
    return found[0].refused.get(kernel.split()[0])


def stands_in(kernel: str) -> str | None:
    """Return the fixture that stands in for a kernel's platform, or None if it is here."""
    here = kernel in ("cudnn", "flex on Hopper") and jax.default_backend() == "gpu"
    return None if here else PLATFORMS.get(kernel)


@pytest.fixture
def device(kernel: str, request: pytest.FixtureRequest) -> None:
    """Set up the kernel's platform or its stand-in."""
    if platform := stands_in(kernel):
        request.getfixturevalue(platform)


@pytest.mark.sampled(0.0015, slow=0)
@pytest.mark.parametrize(("case", "kernel"), _cases())
@pytest.mark.usefixtures("device")
def test_kernel_matches_oracle(case: Case, kernel: str) -> None:
    if stands_in(kernel) == "hopper_memory":
        case = case._replace(size=SMALLER.get(case.size, case.size))
    problem = problem_of(case)
    if reason := refusal(kernel, problem, case.given == "traced"):
        pytest.skip(f"{kernel} refuses: {reason}")
    found = errors(problem, run(kernel, problem, case.given == "traced"))
    allowed = bounds(problem, as_cudnn=kernel == "cudnn")
    beyond = {
        name: (found[name], allowed[name]) for name in found if not found[name] <= allowed[name]
    }
    assert not beyond, f"errors beyond their bounds: {beyond}"


def test_cudnn_runs_natively_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stands_in("cudnn") == "nvidia"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert stands_in("cudnn") is None
    assert stands_in("flex on Hopper") is None
    assert stands_in("flex") == "tpu"
    assert stands_in("blockwise") is None


@pytest.mark.parametrize(("strength", "some"), [(2, cases.ordinary), (3, cases.grid)])
def test_cases_cover_all_combinations(strength: int, some: Any) -> None:
    """Pairs in the ordinary rows, triples together with the grid."""
    missing = cases.all_tuples(cases.FACTORS, strength)
    for case in {*cases.ordinary(), *some()}:
        missing.difference_update(cases.tuples_of(case, strength))
    assert not missing


def test_gpu_day_meets_every_value() -> None:
    for n, (factor, values) in enumerate(cases.FACTORS.items()):
        assert {case[n] for case in cases.ordinary()[::THIRD]} == {*values}, factor


def test_there_are_enough_cases() -> None:
    assert len(set(cases.ordinary())) * len(KERNELS) >= 500
    assert len(set(cases.grid())) * len(KERNELS) >= 2000


@pytest.mark.sampled(0.5, slow=0.3)
@pytest.mark.parametrize("spread", ["soft", "sharp"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_plain_attention_has_the_errors_of_jax_nn(dtype: str, spread: str) -> None:
    """They agree up to the order of sums. In float32 the errors consist of this order only."""
    row = ("causal", "2x129x129", "bias_of_heads", spread, "gqa", dtype)
    problem = problem_of(Case(*row, "no_dropout", "from_0", "known"))
    q, k, v = problem.qkv
    bias = problem.learned["bias"]

    def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return jax.nn.dot_product_attention(
            q, k, v, bias=bias[None], is_causal=True, implementation="xla"
        )

    with jax.numpy_dtype_promotion("standard"):
        out, pull = jax.vjp(attend, q, k, v, bias)
        gradients = pull(problem.cotangents[0])
    known = {
        "cotangent": problem.cotangents[0], "bias": oracle.float64(bias),
        "allowed": np.tri(129, dtype=bool),
    }  # fmt: skip
    for got, ours, want in zip(
        (out, *gradients), flat(plain_attention.attention(q, k, v, **known), bias),
        flat(exact(q, k, v, **known), bias), strict=True,
    ):  # fmt: skip
        theirs, ours = oracle.error(got, want), oracle.error(ours.astype(got.dtype), want)
        assert ours < 2e-6 or theirs / 1.3 < ours < 1.3 * theirs
        assert dtype == "float32" or ours > 2e-6


def flat(found: tuple[Any, Any, oracle.Gradients], bias: Any) -> list[np.ndarray]:
    """Return out, and the gradients of q, k, v and bias."""
    out, _, gradients = found
    return [out, *gradients[:3], oracle.summed_to(gradients.bias, bias.shape)]
