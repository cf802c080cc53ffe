"""The command for a day on a GPU: its steps, their failures, and its report."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.benchmark import __main__ as benchmark
from experiments.benchmark import races
from experiments.gpu_day import __main__ as day
from experiments.gpu_day import results, steps
from experiments.gpu_day.steps import Step
from experiments.runs import settings
from experiments.runs.failures import RunError
from flax_mha.kernels import choose

ROOT = Path(__file__).parent.parent.parent
MACHINE = {"platform": "gpu", "device": "a GPU", "cpu": "a CPU", "python": "3", "versions": {}}


@pytest.mark.parametrize("small", [False, True])
def test_every_step_is_a_valid_command(small: bool, tmp_path: Path) -> None:
    """Flags are parsed as on a GPU, where a misspelled flag would waste the day."""
    plan = steps.plan(small)
    assert len({step.name for step in plan}) == len(plan)
    assert sum(step.seconds for step in plan) < 1.1 * day.TOTAL
    for step in plan:
        _, _, module, *rest = step.command(tmp_path, 100.0)
        if module == "pytest":
            assert step.name in steps.TESTS
            assert all((ROOT / path).is_file() for path in rest if path.endswith(".py"))
        elif module == "experiments.train":
            argv = [x for x in rest if x.startswith("--config.")]
            assert settings.read(["train", *argv], ROOT / "configs" / "masked.py")
        else:
            assert module == "experiments.benchmark"
            flags = benchmark.parse(rest)
            assert flags["total"] == 85.0
            if "decode" not in flags:
                names = races.Settings.__dataclass_fields__.keys() & flags.keys()
                found = races.Settings(**{name: flags[name] for name in names})
                benchmark._check(found)
                assert races.plan(found)


def _step(name: str, code: str, seconds: float = 60.0) -> Step:
    def read(folder: Path, said: str) -> dict[str, float]:
        return {"examples_per_second": float((folder / "result").read_text()), "said": said}

    return Step(name, seconds, ("-c", code, "FOLDER/result", "TOTAL"), read)


GOOD = "import sys; open(sys.argv[1], 'w').write('7'); print('fine')"
BAD = "import sys; print('half'); sys.exit('no kernel image')"
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGABRT)"
LONG = "import sys, time; open(sys.argv[1], 'w').write('3'); time.sleep(60)"


def test_failed_step_is_isolated_and_retried(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(day, "_output", lambda command: json.dumps(MACHINE))
    plan = [_step("train", GOOD), _step("bad", BAD), _step("killed", KILLED),
            _step("long", LONG, 3.0), _step("empty", "pass")]  # fmt: skip
    monkeypatch.setattr(steps, "plan", lambda small: plan)
    # These results are not rows.
    monkeypatch.setattr(results, "core_table", lambda rows: "")
    monkeypatch.setattr(day, "_advice", lambda rows: ["none"])
    folder = tmp_path / "day"
    day.main([f"--workdir={folder}"])
    found = json.loads((folder / "day.json").read_text())["steps"]
    assert {name: step["status"] for name, step in found.items()} == {
        "train": "ok", "bad": "failed", "killed": "failed", "long": "ended", "empty": "failed",
    }  # fmt: skip
    assert found["train"]["result"] == {"examples_per_second": 7.0, "said": "fine\n"}
    assert found["long"]["result"]["examples_per_second"] == 3.0
    assert found["bad"]["reason"] == "exit status 1: no kernel image"
    assert "exit status -6" in found["killed"]["reason"]
    assert "No such file" in found["empty"]["reason"]
    page = (folder / "report.md").read_text()
    assert "7 examples/s" in page
    assert "no kernel image" in page

    plan[1:] = [_step("bad", GOOD)]
    capsys.readouterr()
    day.main([f"--workdir={folder}"])
    shown = capsys.readouterr().out
    assert "train: was done before" in shown
    assert "bad: ok" in shown

    # A failed attempt does not remove earlier results.
    plan[3:] = [_step("long", BAD)]
    day.main([f"--workdir={folder}"])
    found = json.loads((folder / "day.json").read_text())["steps"]
    assert found["long"]["result"]["examples_per_second"] == 3.0

    day.main([f"--workdir={tmp_path / 'late'}", "--total=0.5"])
    assert json.loads((tmp_path / "late" / "day.json").read_text())["steps"]["train"] == {
        "status": "not begun", "seconds": 0.0, "reason": "no time left", "result": None,
    }  # fmt: skip
    monkeypatch.setattr(day, "_output", lambda command: json.dumps({**MACHINE, "device": "other"}))
    with pytest.raises(RunError, match=r"must be of .* other and .*got a GPU, .*; choose"):
        day.main([f"--workdir={folder}"])
    with pytest.raises(RunError, match="must be a new or empty folder"):
        day.main([f"--workdir={tmp_path}"])


DAMAGES = {
    "empty": "", "half written": '{"machine": {"pla', "not JSON": "\x00\x01", "no object": "[1]",
    "another object": '{"steps": {}}', "nested for ever": "[" * 100_000,
    "steps of another kind": json.dumps({"machine": MACHINE, "small": False, "steps": {"a": 1}}),
    "results of another kind": json.dumps({"machine": MACHINE, "small": False, "steps": {
        "train": {"status": "ok", "reason": "", "seconds": 1, "result": {"rate": 3}}}}),
    "small of another kind": json.dumps({"machine": MACHINE, "small": 3, "steps": {}}),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_results_are_set_aside(name: str, tmp_path, monkeypatch, capsys) -> None:
    """With the whole folder. A second time, nothing earlier is lost."""
    monkeypatch.setattr(day, "_output", lambda command: json.dumps(MACHINE))
    monkeypatch.setattr(steps, "plan", lambda small: [_step("train", GOOD)])
    folder = tmp_path / "day"
    for again in ("", "-2"):
        day.main([f"--workdir={folder}"])
        (folder / "day.json").write_text(DAMAGES[name])
        capsys.readouterr()
        day.main([f"--workdir={folder}"])
        line = capsys.readouterr().out.splitlines()[0]
        aside = folder / f"damaged{again}"
        assert str(folder / "day.json") in line
        assert f"its contents are in {aside} now, and the day starts again" in line
        assert (aside / "day.json").read_text() == DAMAGES[name]
        assert (aside / "train" / "result").read_text() == "7"
        found = json.loads((folder / "day.json").read_text())["steps"]
        assert found["train"]["status"] == "ok"


@pytest.mark.slow
def test_step_that_times_out_may_write_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pytest does when interrupted. A step that does not end is killed."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # It starts quickly.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # As in a background job.
    tests = tmp_path / "test_two.py"
    tests.write_text("import time\ndef test_one(): pass\ndef test_two(): time.sleep(60)\n")
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null",
               "--junitxml=FOLDER/tests.xml", str(tests))  # fmt: skip
    step = Step("contract", 12.0, command, steps._read_tests)
    try:
        found = day.run(step, tmp_path, 100.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (found["status"], found["result"]["passed"]) == ("ended", 1), found
    assert found["seconds"] < 50


def test_step_that_ignores_interrupt_is_killed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(day, "GRACE", 0.5)
    stubborn = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    found = day.run(_step("train", stubborn, 2.0), tmp_path, 100.0)
    assert found["status"] == "ended"
    assert found["seconds"] < 50


def test_steps_see_one_gpu(monkeypatch) -> None:
    """Calls without a mesh would be sharded over all GPUs."""
    for given, seen in ((None, "0"), ("3,1", "3"), ("", "")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if given is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert day._environment()["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.slow
def test_oracle_step_collects_the_cudnn_cases(tmp_path: Path) -> None:
    step = next(step for step in steps.plan(False) if step.name == "oracle")
    command = [*step.command(tmp_path, 100.0), "--collect-only"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = [line for line in names.splitlines() if "::" in line]
    assert sum(line.endswith("-cudnn]") for line in found) > 60


@pytest.mark.parametrize("total", ["-1", "nan", "inf", "soon"])
def test_invalid_total_raises(total: str) -> None:
    with pytest.raises(RunError, match="must be a number of seconds above 0, got"):
        day.main([f"--total={total}"])


def test_without_gpu_it_raises(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(day, "_output", lambda command: json.dumps({**MACHINE, "platform": "cpu"}))
    with pytest.raises(RunError, match="needs an NVIDIA GPU, this is cpu; --small runs anywhere"):
        day.main([f"--workdir={tmp_path / 'day'}"])
    monkeypatch.undo()
    with pytest.raises(ValueError, match="JAX does not start here: broken"):
        day._output([sys.executable, "-c", "import sys; sys.exit('broken')"])


def _rows(times: dict[int, tuple[float, float]]) -> list[dict]:
    return [
        {"race": f"T={T}", "label": f"ours-{name}", "dtype": "float32", "T": T, "status": "ok",
         "seconds": {"median": seconds}, "mask": "causal", "passes": "forward"}
        for T, pair in times.items()
        for name, seconds in zip(("reference", "blockwise"), pair, strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize(("times", "limit"), [
    ({256: (1, 2), 1024: (2, 3), 4096: (9, 3)}, 1024),
    # A faster result beyond a slower length is chance.
    ({256: (1, 2), 1024: (3, 2), 4096: (2, 3)}, 256),
    ({256: (2, 1)}, 0),
    ({}, None),
])  # fmt: skip
def test_limit_of_plain_einsums(times, limit: int | None) -> None:
    assert results.limit(_rows(times)) == limit


def test_proposal_is_a_diff_of_the_limit() -> None:
    lines = results.proposal(_rows({256: (1, 2), 1024: (1, 2)})).splitlines()
    for sign, limit in (("-", 2048), ("+", 1024)):
        assert any(
            x[0] == sign and f"fits = symbols.at_most(scores, {limit}**2)" in x for x in lines
        )
    old, new = ([x for x in lines if x[0] == sign and x[1] != sign] for sign in "-+")
    assert len(old) == len(new) == 3
    assert [x[1:].replace("2048", "1024").replace("2,048", "1,024") for x in old] == [
        x[1:] for x in new
    ]
    assert results.proposal(_rows({256: (2, 1)})) == ""
    assert results.proposal(_rows({2048: (1, 2)})) == ""


def test_flex_is_proposed_only_if_all_its_tests_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert results.flex_proposal("NVIDIA H200", {"passed": 60, "failed": []}) == ""
    monkeypatch.setattr(choose, "FLEX_GPUS", frozenset([(8, 0)]))
    passed = {"passed": 60, "skipped": 5, "failed": []}
    lines = results.flex_proposal("NVIDIA H200", passed).splitlines()
    assert "+FLEX_GPUS: frozenset[tuple[int, int]] = frozenset([(8, 0), (9, 0)])" in lines
    for tests in (None, passed | {"passed": 0}, passed | {"failed": ["one"]}):
        assert results.flex_proposal("NVIDIA H200", tests) == ""
    assert results.flex_proposal("a GPU", passed) == ""


def test_slower_cudnn_is_reported() -> None:
    rows = _rows({256: (1, 5), 512: (3, 1)})
    for row in rows:
        row["label"] = row["label"].replace("blockwise", "cudnn")
    assert results.slower_cudnn(rows) == ["T=256: cudnn takes 5.00 times as long as reference"]


@pytest.mark.sampled(0, slow=0.34)
def test_small_day_runs_without_gpu(tmp_path: Path, monkeypatch) -> None:
    # However busy the machine is.
    patient = [step._replace(seconds=10 * step.seconds) for step in steps.plan(True)]
    monkeypatch.setattr(steps, "plan", lambda small: patient)
    day.main(["--small", f"--workdir={tmp_path / 'day'}"])
    found = json.loads((tmp_path / "day" / "day.json").read_text())["steps"]
    assert {name: step["status"] for name, step in found.items()} == dict.fromkeys(found, "ok")
    page = (tmp_path / "day" / "report.md").read_text()
    for title in ("Contract", "packed, milliseconds", "Decoding", "Trainer", "should take"):
        assert f"## {title}" in page or title in page
