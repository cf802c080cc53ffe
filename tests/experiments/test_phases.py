"""Commands print their progress, and are never silent for long."""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from experiments import phases, tasks
from experiments.phases import Phase
from experiments.trainer import loop

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "EVERY", 0.05)


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 120  # However busy the machine is.
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_phase_prints_its_start_and_its_progress(capfd: pytest.CaptureFixture[str]) -> None:
    said = ""

    def heard(pattern: str) -> bool:
        nonlocal said
        out, err = capfd.readouterr()
        assert out == ""
        said += err
        return re.search(pattern, said) is not None

    with Phase("compiling the step"):
        assert heard(r"^compiling the step …\n")
        until(lambda: heard(r"(?m)^still compiling the step, \d+ s\n(still compiling.*\n)"))
    heard("")
    said = ""
    time.sleep(0.2)
    assert not heard(".")


def test_only_innermost_phase_prints(capfd: pytest.CaptureFixture[str]) -> None:
    said = ""

    def heard(pattern: str) -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return re.search(pattern, said) is not None

    with Phase("training", aloud=False) as outer:
        outer.detail = ": step 3/9"
        with Phase("saving", aloud=False):
            capfd.readouterr()
            until(lambda: heard("(.+\n){2}"))
            assert all(line.startswith("still saving, ") for line in said.splitlines())
        until(lambda: heard(r"still training, \d+ s: step 3/9\n"))


def test_other_output_delays_the_progress_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "EVERY", 3600.0)
    with Phase("training", aloud=False) as phase:
        time.sleep(0.05)
        late = phase._left()
        phases.say("a line", sys.stdout)
        assert phase._left() > late


@pytest.mark.parametrize(
    ("arguments", "environment", "heard"),
    [
        ("", {}, True),
        ("--help", {}, False),
        ("--workdir=x -h", {}, False),
        ("--distributed --process_id=0", {}, True),
        ("--distributed --process_id=1", {}, False),
        ("--distributed --process_id 12", {}, False),
        ("--distributed", {"SLURM_PROCID": "3"}, False),
        ("", {"SLURM_PROCID": "3"}, True),
    ],
)
def test_first_process_prints_that_it_loads_modules(
    arguments: str, environment: dict[str, str], heard: bool, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(phases, "quiet", False)
    command = type(sys)("__main__")
    monkeypatch.setitem(sys.modules, "__main__", command)
    phases.begin(arguments.split())
    assert capfd.readouterr().err == (f"{phases.LOADING} …\n" if heard else "")
    if heard:
        until(lambda: capfd.readouterr().err.startswith("still loading JAX"))
    else:
        time.sleep(0.2)
        assert capfd.readouterr().err == ""
    command.main = print  # type: ignore[attr-defined]
    until(lambda: phases._open == [])


def test_command_prints_before_it_loads_jax() -> None:
    """The test ends it at its first line, which precedes slow imports."""
    command = [sys.executable, "-X", "importtime", "-m", "experiments.train"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        imported = []
        for line in process.stderr:
            if not line.startswith("import time:"):
                assert line == f"{phases.LOADING} …\n"
                break
            imported.append(line.split("|")[-1].strip())
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert not {"jax", "numpy", "flax", "rich", "matplotlib"} & set(imported)


@pytest.mark.slow
def test_run_prints_its_phases(
    config: ConfigDict, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    loop.train(loop.build(config, tasks.make(config)), tmp_path)
    out, err = capfd.readouterr()
    begun = [line.removesuffix(" …") for line in err.splitlines() if line.endswith(" …")]
    assert begun == [
        "making the model, or reading its checkpoint", "compiling the step",
        "writing the last checkpoint",
    ]  # fmt: skip
    assert any(line.startswith("still compiling the step, ") for line in err.splitlines())
    assert [line[:8] for line in out.splitlines()] == ["step 3/6", "step 6/6"]


@pytest.mark.slow
def test_planner_prints_that_it_compiles(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "experiments.plan", "--topology=cpu:2", f"--workdir={tmp_path}",
         f"--config={ROOT / 'configs' / 'digits.py'}", "--search", "--most=1"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert re.search(
        r"(?s)^loading JAX.* …\n.*describing cpu:2 …\ncompiling for cpu:2 …\n.*compiled ",
        done.stderr,
    )
    assert "one device, one step" in done.stdout
