"""A mistake at the command line is one line and exit status 1; anything else is a traceback."""

from pathlib import Path

import pytest

from experiments.common import failures
from experiments.common.failures import RunError
from flax_mha import kernels
from tests.experiments.launch import call

COMMANDS = ("train", "generate", "look", "convert", "plan", "measure")


@pytest.mark.sampled(0)
@pytest.mark.parametrize("command", COMMANDS)
def test_help_creates_no_files(command: str, tmp_path: Path) -> None:
    done = call(command, "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"python -m experiments.{command}" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("train", "--workdir=", "--workdir must be a folder"),
        ("train", "--worker=a", "Unknown command line flag 'worker'"),
        ("train", "now", "takes no arguments but flags, got ['now']"),
        ("train", "--config.optimizer.learning_rat=1", 'Did you mean "learning_rate"'),
        ("train", "--config.steps=abc", "flag --config.steps=abc: invalid literal for int()"),
        ("train", "--config=nothere.py", "No such file or directory: 'nothere.py'"),
        ("train", "--weights=nothere", "--weights must be the folder of a run"),
        ("train", "--config.mesh.force_host_devices=-1", "must be a whole number from 0, got -1"),
        ("train", "--num_processes=2", "--process_id need --distributed"),
        ("train", "--config.model.kernel=flex", "kernel='flex' can't run this call"),
        ("train", "--config.model.num_heads=5", "num_heads=5"),
        ("train", "--config.model.features=65536", "must fit the memory of"),
        ("generate", "--seed=-1 --prompt=x --workdir=a", "flag --seed=-1"),
        ("generate", "--prompt=x --workdir=nothere", "must be the folder of a run"),
        ("generate", "--prompt=x --model=nothere", "nothere"),
        ("convert", "a", "takes the arguments SRC DST, got ['a']"),
    ],
)
def test_mistakes_are_one_line(
    command: str, words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    done = call(command, *words.split(), cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    *phases, line = done.stderr.splitlines()
    assert all(each.endswith(" …") for each in phases), done.stderr
    assert line.startswith("error: ")
    assert message in line
    assert not list(tmp_path.iterdir())


def test_refusals_are_lines_and_bugs_are_tracebacks(capsys: pytest.CaptureFixture[str]) -> None:
    for mistake in (lambda: kernels.use("nothere").__enter__(), lambda: _raise(RunError("mine"))):
        with pytest.raises(SystemExit, match="error: ") as end, failures.boundary():
            mistake()
        assert "\n" not in str(end.value.code)
    with pytest.raises(ValueError, match="a bug"), failures.boundary():
        _raise(ValueError("a bug"))


def _raise(error: Exception) -> None:
    raise error
