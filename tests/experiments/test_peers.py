"""Attention beside other libraries: the command, its measurements, and equal results."""

import argparse
import dataclasses
import functools
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.measure import __main__ as measure
from experiments.measure import timing
from experiments.measure.peers import contestants, fresh, races
from experiments.measure.peers.cases import Case
from experiments.measure.peers.contestants import CONTESTANTS, Contestant
from experiments.measure.peers.work import Outcome, visible
from experiments.measure.timing import RefusalError, Work
from experiments.runs import command
from experiments.runs.failures import RunError
from tests.support.oracle import error

MIB = 2**20
TINY = ("--lengths=16,32", "--heads=2", "--features=16", "--batch=2", "--seconds=0.02")
SMALL = Case("layer", backward=True, causal=True, B=2, T=12, N=2, D=16)


@pytest.fixture(autouse=True)
def _as_users_run() -> Iterator[None]:
    """Allow implicit promotion, which other libraries rely on."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def flags(*words: str) -> argparse.Namespace:
    parser = command.Parser("")
    races.add_flags(parser)
    return races.filled(parser.parse_args(words))


@pytest.mark.sampled(0, slow=0.16)
def test_peers_write_tables_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "results"
    names = ("ours", "linen", "jax-xla", "jax-cudnn")
    measure.main(
        ["peers", *TINY, f"--contestants={','.join(names)}", "--dtypes=float32", "--memory=none",
         "--masks=full", f"--workdir={folder}"]
    )  # fmt: skip
    shown = capsys.readouterr().out
    assert "layer: times faster than linen" in shown
    assert "core: times faster than jax-xla" in shown
    assert str(folder) in shown.replace("\n", "")

    result = json.loads((folder / "results.json").read_text())
    assert result["machine"]["cores"] >= 1
    assert result["machine"]["versions"]["jax"] == jax.__version__
    rows = result["rows"]
    # Two lengths and passes; the layer has 2 contestants, the core 4.
    assert len(rows) == 4 * (2 + 4)
    for row in rows:
        assert {row["T"], row["B"], row["D"]} <= {16, 32, 2}
        if row["contestant"] == "jax-cudnn":
            assert row["status"] == "skipped"
            assert "needs an NVIDIA GPU" in row["reason"]
        else:
            time = row["seconds"]
            assert row["status"] == "ok"
            assert 0 < time["q1"] <= time["median"] <= time["q3"]
            assert time["rounds"] >= 1
            assert row["flops_per_second"] > 0
            base = {"layer": "linen", "core": "jax-xla"}[row["part"]]
            assert (row["ratio"] == 1) if row["contestant"] == base else row["ratio"] > 0


@functools.lru_cache
def outcome(name: str, case: Case) -> Outcome:
    work = contestants.build(name, case)
    result = work.call()
    work.wait(result)
    return work.outcome(result)


@pytest.mark.sampled(0.02)
@pytest.mark.parametrize(
    ("causal", "window", "dtype"),
    [(True, 0, "float32"), (False, 0, "float32"), (True, 5, "float32"), (True, 0, "bfloat16")],
    ids=["causal", "full", "window", "bfloat16"],
)
@pytest.mark.parametrize(
    ("part", "name"), [(part, name) for part, group in CONTESTANTS.items() for name in group]
)
def test_contestants_agree(part: str, name: str, causal: bool, window: int, dtype: str) -> None:
    """Outputs and gradients are equal, so the same computation is timed."""
    module = CONTESTANTS[part][name].module
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    case = dataclasses.replace(SMALL, part=part, causal=causal, window=window, dtype=dtype)
    try:
        actual = outcome(name, case)
    except RefusalError as refusal:
        pytest.skip(str(refusal))
    expected = outcome(contestants.BASELINES[part], case)
    tolerance = 1e-5 if dtype == "float32" else 3e-2
    assert error(actual.out, expected.out) < tolerance
    assert len(actual.grads) == len(expected.grads) == len(case.inputs())
    for grad, wanted in zip(actual.grads, expected.grads, strict=True):
        assert error(grad, wanted) < tolerance
    assert actual.norm == pytest.approx(expected.norm, rel=tolerance)
    assert (expected.norm > 0) == (part == "layer")
    if dtype == "float32":
        forward = outcome(name, dataclasses.replace(case, backward=False))
        assert error(forward.out, expected.out) < tolerance
        assert forward.grads == ()


@pytest.mark.parametrize("name", CONTESTANTS["core"])
def test_contestants_agree_on_packed_documents_and_groups(name: str) -> None:
    """Documents have different lengths. Forward, every other kernel of ours agrees too."""
    module = CONTESTANTS["core"][name].module
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    case = dataclasses.replace(SMALL, part="core", documents=3, N=4, K=2)
    assert len(set(case.lengths())) > 1
    try:
        actual = outcome(name, case)
    except RefusalError as refusal:
        pytest.skip(str(refusal))
    expected = outcome("ours-reference", case)
    for one, other in zip(actual[:1] + actual.grads, expected[:1] + expected.grads, strict=True):
        assert error(one, other) < 1e-5


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("documents", [0, 1, 4])
@pytest.mark.parametrize("window", [0, 1, 5, 12, 20])
def test_flops_count_visible_scores(causal: bool, documents: int, window: int) -> None:
    case = dataclasses.replace(
        SMALL, part="core", backward=False, causal=causal, window=window, documents=documents
    )
    mask = visible(case)
    seen = 12 * 12 if mask is None else int(np.asarray(mask).sum())
    assert case.flops() == 4 * 2 * seen * 16


def broken(case: Case) -> Work:
    raise ImportError("no such symbol\nin this version")


def fragile(case: Case) -> Work:
    """Build work that fails in its second call."""
    calls = iter([1])
    return Work(lambda: next(calls), lambda _: None, lambda _: pytest.fail("unused"))


@pytest.mark.sampled(0.13, slow=0.2)
def test_failed_contestants_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group = {
        "jax-xla": CONTESTANTS["core"]["jax-xla"],
        "broken": Contestant(broken),
        "fragile": Contestant(fragile),
        "absent": Contestant(broken, module="no_such_module"),
    }
    monkeypatch.setitem(CONTESTANTS, "core", group)
    measure.main([
        "peers", *TINY, "--parts=core", "--passes=forward", "--masks=causal", "--dtypes=float32",
        "--memory=none", f"--workdir={tmp_path}",
    ])  # fmt: skip
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    found = {row["contestant"]: (row["status"], row["reason"]) for row in rows}
    assert found == {
        "jax-xla": ("ok", None),
        "broken": ("failed", "ImportError: no such symbol"),
        "fragile": ("failed", "StopIteration"),
        "absent": ("skipped", "no_such_module is not installed"),
    }
    shown = capsys.readouterr().out
    for _, reason in found.values():
        assert reason is None or reason in shown


def test_case_beyond_memory_is_refused() -> None:
    long = Case("layer", backward=True, causal=True, B=1, T=16384)
    with pytest.raises(RefusalError, match=r"needs about 64 GiB, 24 are free"):
        contestants.build("linen", long, 24 * 2**30)


def test_race_without_time_starts_nothing() -> None:
    race = races.plan(flags("--lengths=16"))[0]
    rows = races.measure(race, 1, 1.0, 0.0)
    assert {row["reason"] for row in rows} == {"no time left; raise --total"}
    assert len(rows) == len(CONTESTANTS["layer"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths=12,x"], "--lengths: must be a whole number from 1, got 'x'"),
        (["--heads=0"], "--heads: must be a whole number from 1, got '0'"),
        (["--dtypes=float64"], "--dtypes: must be some of float32,bfloat16"),
        (["--contestants=our"], "must be some of ours,linen,.* got 'our'"),
        (["--seconds=-1"], "--seconds: must be a number of seconds above 0, got '-1'"),
        (["--heads=3"], "--features must be a multiple of --heads, got 512 and 3; choose another"),
        (
            ["--parts=core", "--kv_heads=3"],
            "--kv_heads must divide --heads, with",
        ),
        (
            ["--masks=packed", "--lengths=4"],
            "--lengths must be at least --documents=8",
        ),
        (["--parts=core", "--contestants=keras"], "--contestants must name one that takes part"),
        (["--workdir=tests"], "must be a new or empty folder, and .*tests is not; choose another"),
        (["--length=16"], "unrecognized arguments: --length=16"),
    ],
)
def test_bad_flags_give_clear_errors(words: list[str], message: str) -> None:
    with pytest.raises(RunError, match=message):
        measure.main(["peers", *words])


def test_quick_is_a_subset_of_the_full_plan() -> None:
    quick = flags("--quick", "--lengths=128")
    assert (quick.lengths, quick.masks, quick.total < 120) == ((128,), ("causal",), True)
    assert {len(race.contestants) for race in races.plan(flags("--quick"))} == {3}
    full = races.plan(flags())
    assert len(full) == 8 * 2 * 2 * 2 * 2
    assert {race.case.dtype for race in full} == {"float32", "bfloat16"}


def sleeping(seconds: float, log: list[str], name: str) -> Work:
    def call() -> None:
        log.append(name)
        timing.time.sleep(seconds)

    return Work(call, lambda _: None, lambda _: pytest.fail("unused"))


def test_contestants_take_turns() -> None:
    log: list[str] = []
    works = {name: sleeping(0.03, log, name) for name in "abc"}
    found = timing.interleave(works, rounds=3, seconds=10.0)
    # Two calls each to compile and to estimate the time; then each leads a round.
    assert "".join(log) == "aabbcc" + "abc" + "bca" + "cab"
    for time in found.values():
        assert isinstance(time, timing.Timing)
        assert time.rounds == 3
        assert 0.03 <= time.median < 0.3


def test_slow_contestant_leaves_time_for_others() -> None:
    works = {"slow": sleeping(0.3, [], ""), "fast": sleeping(0.03, [], "")}
    found: dict[str, Any] = timing.interleave(works, rounds=50, seconds=0.4)
    assert found["slow"].rounds == 1
    assert 2 <= found["fast"].rounds < 50
    assert found["slow"].median > found["fast"].median


@pytest.mark.sampled(0.13, slow=0.2)
def test_growth_measures_temporary_memory() -> None:
    def call() -> float:
        return float(np.ones(256 * MIB // 8).sum())

    assert 255 * MIB <= fresh.growth(call) <= 272 * MIB
    assert 255 * MIB <= fresh.growth(call) <= 272 * MIB  # memory freed before does not hide it
    assert fresh.growth(lambda: 0) < 4 * MIB


@pytest.mark.sampled(0, slow=0.16)
def test_fresh_process_measures_memory_and_compile_time() -> None:
    case = Case("core", backward=False, causal=True, B=1, T=2048)
    scores = 4 * 8 * 2048**2
    found = fresh.weigh("jax-xla", case, None, 120.0)
    assert isinstance(found, fresh.Weight), found
    assert scores <= found.bytes <= 6 * scores
    assert found.compile is not None
    assert 0 < found.compile < 60
    ours = fresh.weigh("ours-blockwise", case, None, 120.0)
    assert isinstance(ours, fresh.Weight), ours
    assert ours.bytes < scores / 2
    assert fresh.weigh("linen", case, 1, 120.0) == timing.Failure("needs about 0 GiB, 0 are free")
