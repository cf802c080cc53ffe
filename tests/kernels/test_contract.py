"""Every kernel: its row of the contract, and what only it claims."""

from typing import Any, ClassVar

import jax
import numpy as np
import pytest

from flax_mha.kernels import KERNELS, definition
from flax_mha.kernels.call.bind import bind_call
from tests.kernels import cases, contract
from tests.kernels.cases import Case
from tests.kernels.contract import EVERY, KernelContract
from tests.kernels.problems import exact, problem_of
from tests.support import oracle, plain_attention


class TestDefinition(KernelContract):
    kernel, derivatives = "reference", EVERY

    def attend(self, *qkv: Any, **call: Any) -> Any:
        out, sums = definition.attend(*bind_call(*qkv, **call))
        return out, sums.lse


class TestReference(KernelContract):
    kernel, derivatives = "reference", EVERY


class TestCheckpointed(KernelContract):
    kernel, derivatives = "checkpointed", EVERY


class TestBlockwise(KernelContract):
    kernel, derivatives = "blockwise", ("jvp of grad", "grad of grad")
    under_traced = ("jvp of grad",)


class TestDecode(KernelContract):
    kernel = "decode"


class TestShort(KernelContract):
    kernel, platform = "short", "tpu"


class TestFlex(KernelContract):
    kernel, platform = "flex", "tpu"


class TestSplash(KernelContract):
    kernel, platform, hidden = "splash", "tpu", 1e18
    test_scores_of_ten_thousand = None  # Its gradients are computed from a float32 lse.


class TestCudnn(KernelContract):
    kernel, platform, native = "cudnn", "nvidia", "gpu"
    dtype, hidden = "bfloat16", 1e9


# Too long for the fast tests, which have a case of their own for it.
@pytest.mark.slow
class TestFlexOnHopper(KernelContract):
    kernel, platform, native = "flex", "hopper_memory", "gpu"
    dtype, ways = "bfloat16", ("jit",)
    # The interpreter for Hopper calls Python for each access to memory, so that its time grows with
    # rows and tiles. It gets fewer tiles: still several, full, partial and empty ones.
    sizes: ClassVar = {"2x257x257": "2x129x257", "1x600x600": "1x129x257"}


def test_every_kernel_has_a_row() -> None:
    assert {row.kernel for row in KernelContract.__subclasses__()} == {*KERNELS}


def test_cudnn_runs_natively_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TestCudnn.stands_in() == "nvidia"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert TestCudnn.stands_in() is None
    assert TestFlexOnHopper.stands_in() is None
    assert TestFlex.stands_in() == "tpu"
    assert TestBlockwise.stands_in() is None


@pytest.mark.parametrize(("strength", "some"), [(2, cases.ordinary), (3, cases.grid)])
def test_cases_cover_all_combinations(strength: int, some: Any) -> None:
    """Pairs in the ordinary rows, triples together with the grid."""
    missing = cases.all_tuples(cases.FACTORS, strength)
    for case in {*cases.ordinary(), *some()}:
        missing.difference_update(cases.tuples_of(case, strength))
    assert not missing


def test_gpu_day_meets_every_value() -> None:
    for n, (factor, values) in enumerate(cases.FACTORS.items()):
        assert {case[n] for case in cases.ordinary()[:: contract.THIRD]} == {*values}, factor


def test_there_are_enough_cases() -> None:
    assert len(set(cases.ordinary())) * len(cases.KERNELS) >= 500
    assert len(set(cases.grid())) * len(cases.KERNELS) >= 2000


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
