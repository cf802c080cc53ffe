"""Failures of the machine give a one-line error and a nonzero exit code."""

import ast
import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments.runs import failures

ROOT = Path(__file__).parent.parent.parent
SMALL = (
    "--config.steps=2", "--config.batch_size=16", "--config.model.num_layers=1",
    "--config.model.features=256",
)  # fmt: skip
# Runs before every import: hides the package named in the environment.
HIDDEN = """
import os, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["HIDDEN"]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""


def call(
    command: str, *arguments: str, under: Sequence[str] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    inherited |= {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [*under, sys.executable, "-m", f"experiments.{command}", *arguments],
        cwd=ROOT, env=inherited | env, capture_output=True, text=True, check=False,
    )  # fmt: skip


def said(done: subprocess.CompletedProcess[str]) -> str:
    """Return the line of an error, which follows the lines of phases."""
    assert done.returncode == 1
    *before, line = done.stderr.splitlines()
    assert all(each.endswith(" …") or each.startswith("still ") for each in before)
    assert line.startswith("error: ")
    return line


def slow(*values: str) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("plan", "ml_collections"),
        slow("train", "absl"),
        slow("train", "babel"),
        slow("train", "sklearn"),  # imported with the data
        slow("generate", "orbax"),
    ],
)
def test_missing_package_is_named_with_its_extra(
    command: str, package: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDDEN)
    flags = {"train": [f"--workdir={tmp_path / 'run'}"]}
    env = {"HIDDEN": package, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    line = said(call(command, *flags.get(command, ()), **env))
    assert f"the package {package} is not installed" in line
    assert "pip install -e '.[experiments]'" in line


def test_failures_knows_every_imported_package() -> None:
    found = set()
    for path in (ROOT / "experiments").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    # Peers are measured if installed, and skipped otherwise.
    peers = {"torch", "equinox", "haiku", "keras", "tokamax", "fa4_jax", "libtpu"}
    ours = {"experiments", "configs", "mpl_toolkits"}
    assert found - set(sys.stdlib_module_names) - peers - ours <= failures.PACKAGES


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/a/metrics.jsonl"),
            r"No space left on device: runs/a/metrics\.jsonl; make room, or give",
        ),
        (OSError(errno.EROFS, "", "runs"), r"Read-only file system: runs; .* can be written"),
        (PermissionError(errno.EACCES, "", "runs"), r"Permission denied: runs; .* can be written"),
        (
            ExceptionGroup("several", [ValueError("UNKNOWN: write: No space left on device [28]")]),
            "No space left on device; make room",
        ),
        (ValueError("a bug"), None),
        (FileNotFoundError(errno.ENOENT, "a bug", "table.json"), None),
        (ModuleNotFoundError("a config's own", name="elsewhere"), None),
    ],
)
def test_system_errors_give_their_reason(error: Exception, line: str | None) -> None:
    try:
        try:
            raise error
        except Exception as cause:
            raise RuntimeError("saving failed") from cause
    except RuntimeError as outer:
        found = failures.reason(outer)
    if line is None:
        assert found is None
    else:
        assert found is not None
        assert re.match(line, found)


def test_removed_folder_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_needed", {})
    run = tmp_path / "run"
    line = f"{run}, or a part of it, was removed while it was written to; nothing more is saved"
    for name in ("run.json", "checkpoints"):
        (run / name).mkdir(parents=True)
        failures.needs(run / name)
    # The errors of Python and TensorStore contain the missing paths.
    assert failures.reason(ValueError("a bug")) is None
    assert failures.reason(FileNotFoundError(errno.ENOENT, "No such file", "elsewhere")) is None
    missing = run / "checkpoints" / "3.orbax-checkpoint-tmp"
    for error in (
        FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(missing)),
        ValueError(f'Error writing "{missing}/": Failed: No such file or directory'),
    ):
        assert failures.reason(error) == line
    # A recreated folder is a different one.
    (run / "checkpoints").rename(tmp_path / "old")
    (run / "checkpoints").mkdir()
    assert failures.reason(ValueError("No ArrayMetadata found")) == line
    shutil.rmtree(run)
    assert failures.reason(ValueError("No ArrayMetadata found")) == line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyboardInterrupt(), "interrupted; nothing was begun"),
        (RuntimeError("Unable to initialize backend 'foo': …\nmore"), "Unable to initialize backe"),
    ],
)
def test_interrupts_and_backend_errors_give_their_reason(error: BaseException, line: str) -> None:
    assert failures.reason(error).startswith(line)
    assert "\n" not in failures.reason(error)


def test_full_disk_in_any_thread_ends_the_program() -> None:
    program = (
        "import errno, threading, time\n"
        "from experiments.runs import failures\n"
        "failures.install()\n"
        "def full(): raise OSError(errno.ENOSPC, '')\n"
        "threading.Thread(target=full).start()\n"
        "time.sleep(600)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=500,
    )  # fmt: skip
    assert said(done) == "error: No space left on device; make room, or give a --workdir elsewhere"


DIES = """
import pathlib, runpy, sys, threading, time
from experiments.runs import failures

def die(log):
    while not (log.exists() and log.stat().st_size):
        time.sleep(0.05)
    raise ValueError("odd")

failures.install()
log = pathlib.Path(sys.argv[1].removeprefix("--workdir=")) / "metrics.jsonl"
threading.Thread(target=die, args=[log], name="an odd thread").start()
runpy.run_module("experiments.train", run_name="__main__")
"""


@pytest.mark.slow
def test_dead_thread_ends_a_run_after_its_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    never = [f"--config.{key}=100000" for key in ("steps", "evaluate_every", "checkpoint_every")]
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", DIES, f"--workdir={run}", *SMALL, *never], cwd=ROOT,
        env=env | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: an odd thread failed: ValueError: odd; its traceback is in ")
    step = re.search(r"stopped at step (\d+); to go on: --workdir=", line)[1]
    assert [path.name for path in (run / "checkpoints").iterdir()] == [step]


@pytest.mark.slow
def test_file_among_parent_folders_raises(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = said(call("measure", "peers", "--quick", f"--workdir={tmp_path / 'file' / 'run'}"))
    assert "Not a directory" in line
    assert str(tmp_path / "file") in line


@pytest.mark.sampled(0, slow=0.16)
def test_full_disk_during_checkpoint_raises(tmp_path: Path) -> None:
    shell = ("bash", "-c", 'ulimit -f 256; exec "$@"', "bash")  # KiB, of any file
    done = call("train", f"--workdir={tmp_path / 'run'}", *SMALL, under=shell)
    assert "File too large; make room" in said(done)
