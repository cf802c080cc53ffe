"""Attention next to other libraries: the command, its measurements, and equal results."""

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.measure import __main__ as measure
from experiments.measure import timing
from experiments.measure.peers import contestants, fresh, torch_peers
from experiments.measure.peers.cases import Case
from experiments.measure.peers.contestants import CONTESTANTS
from experiments.measure.timing import RefusalError, Work
from experiments.runs.failures import RunError
from flax_mha import dot_product_attention
from tests.support.oracle import error

TINY = (
    "peers", "--lengths=16,32", "--heads=2", "--features=16", "--batch=2", "--seconds=0.02",
    "--dtypes=float32", "--memory=none",
)  # fmt: skip
SMALL = Case("layer", "backward", "causal", B=2, T=12, N=2, D=16)


@pytest.fixture(autouse=True)
def _as_users_run() -> Iterator[None]:
    """Allow implicit promotion, which other libraries rely on."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.sampled(0, slow=0.16)
def test_peers_write_tables_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "results"
    names = "--contestants=ours,linen,jax-xla,jax-cudnn,ours-prompt"
    measure.main([*TINY, "--parts=layer,core,step", "--masks=full", names, f"--workdir={folder}"])
    shown = capsys.readouterr()
    assert "timing layer, forward, full, float32, B=2 T=16, 1 of 10 …" in shown.err
    assert (folder / "table.md").read_text().strip() in shown.out

    result = json.loads((folder / "results.json").read_text())
    assert result["machine"]["cores"] >= 1
    assert result["machine"]["versions"]["jax"] == jax.__version__
    # Two lengths and passes; the layer has 2 contestants, the core 3, a step has 3 and no passes.
    assert len(result["rows"]) == 4 * (2 + 3) + 2 * 3
    for row in result["rows"]:
        if row["contestant"] == "jax-cudnn":
            assert (row["status"], row["reason"]) == ("refused", "needs an NVIDIA GPU; this is cpu")
            continue
        assert row["status"] == "ok"
        assert 0 < row["q1"] <= row["median"] <= row["q3"]
        assert all(rate > 0 for rate in row["rates"].values())
        base = contestants.BASELINES[row["part"]]
        assert (row["ratio"] == 1) if row["contestant"] == base else row["ratio"] > 0
    # Keys and values of 24 tokens, and four projections.
    step = next(row for row in result["rows"] if (row["part"], row["T"]) == ("step", 32))
    read = step["rates"]["GB"] * step["median"] * 1e9
    assert read == pytest.approx((2 * 2 * 24 * 16 + 4 * 16 * 16) * 4)


@functools.lru_cache
def outcome(name: str, case: Case) -> list[np.ndarray]:
    """Return the output, the gradients of the inputs, and the norm of those of parameters."""
    result = jax.tree.leaves(contestants.build(name, case).call(), is_leaf=_is_tensor)
    out, *grads = (x.detach().float().numpy() if _is_tensor(x) else np.float32(x) for x in result)
    # JAX's gradients of inputs come after those of parameters, torch's before.
    inputs = len(case.inputs()) if grads else 0
    split = inputs if name.startswith("torch") else len(grads) - inputs
    first, others = (grads[:split], grads[split:])[:: 1 if name.startswith("torch") else -1]
    norm = np.sqrt(sum(np.square(x, dtype=np.float64).sum() for x in others))
    return [out, *first, norm]


def _is_tensor(x: Any) -> bool:
    return hasattr(x, "detach")


@pytest.mark.sampled(0.02)
@pytest.mark.parametrize(
    ("mask", "window", "dtype"),
    [("causal", 0, "float32"), ("full", 0, "float32"), ("causal", 5, "float32"),
     ("full", 5, "float32"), ("causal", 0, "bfloat16")],
)  # fmt: skip
@pytest.mark.parametrize(
    ("part", "name"), [(part, name) for part in ("layer", "core") for name in CONTESTANTS[part]]
)
def test_contestants_agree(part: str, name: str, mask: str, window: int, dtype: str) -> None:
    """Outputs and gradients are equal, so the same computation is timed."""
    case = dataclasses.replace(SMALL, part=part, mask=mask, window=window, dtype=dtype)
    row: dict[str, Any] = {}
    with timing.noted(row):
        found = outcome(name, case)
    if row["status"] == "refused":
        pytest.skip(row["reason"])
    assert row == {"status": "ok"}
    expected = outcome(contestants.BASELINES[part], case)
    tolerance = 1e-5 if dtype == "float32" else 3e-2
    assert len(found) == 2 + len(case.inputs())
    for one, wanted in zip(found[:-1], expected[:-1], strict=True):
        assert error(one, wanted) < tolerance
    if part == "layer":
        assert found[-1] == pytest.approx(expected[-1], rel=tolerance)
        assert expected[-1] > 0
    if dtype == "float32":
        forward = outcome(name, dataclasses.replace(case, passes="forward"))
        assert error(forward[0], expected[0]) < tolerance


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("window", [0, 1, 5, 12, 20])
def test_flops_count_visible_scores(mask: str, window: int) -> None:
    case = dataclasses.replace(SMALL, part="core", passes="forward", mask=mask, window=window)
    i, j = np.arange(12)[:, None], np.arange(12)
    seen = (abs(i - j) < (window or 12)) & ((j <= i) | (mask == "full"))
    assert case.amounts() == {"TFLOP": pytest.approx(4 * 2 * seen.sum() * 16 / 1e12)}
    if case.visible() is not None:
        np.testing.assert_array_equal(case.visible(np), seen)
        np.testing.assert_array_equal(case.visible(), seen)
    torch = pytest.importorskip("torch")
    rule = torch_peers.rule(case)(0, 0, torch.arange(12)[:, None], torch.arange(12))
    np.testing.assert_array_equal(rule.numpy(), seen)


def test_failed_contestants_say_why() -> None:
    def broken() -> Work:
        raise ImportError("no such symbol\nin this version")

    def absent() -> Work:
        import no_such_module  # noqa: F401

        raise AssertionError

    def refusing() -> Work:
        q = jax.numpy.ones((1, 4, 2, 8))
        return Work(lambda: dot_product_attention(q, q, q, kernel="splash"))

    calls = iter([1])
    found = timing.race(
        {
            "broken": broken, "absent": absent, "refusing": refusing,
            "fragile": lambda: Work(lambda: next(calls)),  # fails in its second call
        },
        1, 1.0,
    )  # fmt: skip
    assert {name: (row["status"], row["reason"]) for name, row in found.items()} == {
        "broken": ("failed", "ImportError: no such symbol"),
        "absent": ("refused", "no_such_module is not installed"),
        "refusing": ("refused", "runs on TPU only, this is cpu"),
        "fragile": ("failed", "StopIteration"),
    }
    assert timing.cells(found["fragile"]) == ["failed: StopIteration", "", ""]


def test_case_beyond_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants.machine, "free_bytes", lambda: 24 * 2**30)
    with pytest.raises(RefusalError, match=r"needs about 64 GiB, 24 are free"):
        contestants.build("linen", Case("layer", "backward", "causal", B=1, T=16384))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths=12,x"], "--lengths: must be a whole number from 1, got 'x'"),
        (["--contestants=our"], "must be some of ours,linen,.* got 'our'"),
        (["--seconds=-1"], "--seconds: must be a number of seconds above 0, got '-1'"),
        (["--heads=3"], "--features must be a multiple of --heads, got 512 and 3; choose another"),
        (["--parts=core", "--contestants=keras"], "--contestants must name one that takes part"),
        (["--workdir=tests"], "must be a new or empty folder, and .*tests is not; choose another"),
    ],
)
def test_bad_flags_give_clear_errors(words: list[str], message: str) -> None:
    with pytest.raises(RunError, match=message):
        measure.main(["peers", *words])


class Clock:
    """A clock that only sleep moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def sleeping(seconds: float, log: list[str], name: str) -> Work:
    return Work(lambda: (log.append(name), timing.time.sleep(seconds)))


def test_contestants_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "time", Clock())
    log: list[str] = []
    builds = {name: functools.partial(sleeping, 0.03, log, name) for name in "abc"}
    found = timing.race(builds, rounds=3, seconds=10.0)
    # Two calls each to compile and to estimate the time; then each leads a round.
    assert "".join(log) == "aabbcc" + "abc" + "bca" + "cab"
    for row in found.values():
        assert (row["status"], row["rounds"], row["compile"]) == ("ok", 3, None)
        assert [row[name] for name in ("q1", "median", "q3")] == pytest.approx([0.03] * 3)
        assert row["ratio"] == pytest.approx(1)


def test_slow_contestant_leaves_time_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "time", Clock())
    builds = {"slow": lambda: sleeping(0.3, [], ""), "fast": lambda: sleeping(0.03, [], "")}
    found = timing.race(builds, rounds=50, seconds=0.4, baseline="slow")
    # Each has 0.2 s: a call of the slow one, and seven of the fast one.
    assert (found["slow"]["rounds"], found["fast"]["rounds"]) == (1, 7)
    assert found["fast"]["ratio"] == pytest.approx(10)


@pytest.mark.sampled(0, slow=0.16)
def test_fresh_process_measures_memory_and_compile_time() -> None:
    case = Case("core", "forward", "causal", B=1, T=2048)
    scores = 4 * 8 * 2048**2
    found = fresh.weigh("jax-xla", case)
    assert scores <= found["bytes"] <= 6 * scores
    assert 0 < found["compile"] < 60
    assert fresh.weigh("ours-blockwise", case)["bytes"] < scores / 2
    assert fresh.weigh("jax-cudnn", case)["reason"] == "needs an NVIDIA GPU; this is cpu"


@pytest.mark.sampled(0.3)
def test_steps_read_the_tokens_that_the_cache_holds() -> None:
    """Every call writes the same slot after the same tokens."""
    case = Case("step", "forward", "causal", B=2, T=64, N=2, D=8)
    group = CONTESTANTS["step"]
    for name in ("ours", "linen", "ours-int8"):
        work = group[name](case)
        first = np.asarray(work.call())
        np.testing.assert_array_equal(work.call(), first)
    read = (2 * 2 * 8 + 4 * 64) * 4 / 1e9  # a token, and the projections
    assert group["ours-nearly-empty"](case).amounts == {"GB": read, "tokens": 2}
    assert group["ours-prompt"](case).amounts["tokens"] == 64
