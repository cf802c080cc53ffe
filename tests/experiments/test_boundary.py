"""Whatever ends a command is one line and a nonzero exit, never a traceback."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.runs import failures, files
from experiments.runs.failures import RunError
from flax_mha import masks

ROOT = Path(__file__).parent.parent.parent
SMALL = "--config.steps=1 --config.batch_size=16 --config.model.num_layers=1"


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_an_error_that_nobody_foresaw_names_the_file_of_its_traceback() -> None:
    line = failures.describe(raised(KeyError("a\nb")))
    match = re.fullmatch(r"KeyError: 'a\\nb'; its traceback is in (\S+)", line)
    assert match
    path = Path(match[1])
    assert "in raised" in path.read_text()
    path.unlink()


def test_a_traceback_that_cannot_be_kept_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures.tempfile, "tempdir", "/nowhere")
    line = failures.describe(raised(ZeroDivisionError("x")))
    assert line.startswith("ZeroDivisionError: x; its traceback can't be kept: ")


def test_mistakes_are_told_in_their_own_words() -> None:
    assert failures.describe(raised(RunError("a must be b"))) == "a must be b"
    with pytest.raises(TypeError, match="must be") as refused:
        masks.combine("x")
    assert failures.describe(refused.value) == str(refused.value)
    # The same kind of error from elsewhere is a bug.
    assert failures.describe(raised(TypeError("bug"))).startswith("TypeError: bug; its traceback")


def test_lines_are_short_and_have_no_control_characters() -> None:
    line = failures.describe(RunError(f"rule {'x' * 10**6}\x1b[31m\x9b\u202e; remedy"))
    assert line.startswith("rule xxx")
    assert line.endswith(r"\x1b[31m\x9b\u202e; remedy")
    assert len(line) < 1000


def test_log_that_became_a_link_is_named(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.symlink_to("/etc/hostname")
    with pytest.raises(OSError, match="symbolic") as refused:
        files.append(log, "row\n")
    line = failures.describe(refused.value)
    assert line == f"Too many levels of symbolic links: {log}; {failures.BARRED}"


COMMANDS = {
    "proc": ("train --workdir=/proc/x/y", {}, "must be a folder that can be made, got /proc/x/y"),
    "flag": ("train --stderrthreshold=foo", {}, "--stderrthreshold must be one of"),
    "exit": ("train --config={tmp}/exit.py", {}, "SystemExit: 0"),
    "itself": ("train --config={tmp}/itself.py", {}, "RecursionError: "),
    "steps": ("studies.recall --steps=0", {}, "--steps: must be a whole number from 1, got '0'"),
    "seeds": ("studies.markov --seeds=x", {}, "--seeds: must be a whole number from 1, got 'x'"),
    "matplotlib": ("report a", {"MPLBACKEND": "foo"}, "'foo' is not a valid value for backend"),
    "jax": (f"train {SMALL}", {"JAX_NUM_CPU_DEVICES": "foo"}, 'Invalid value "foo"'),
    "long": (
        "train --config=configs/dates.py --config.data.path={tmp}/long.tsv", {},
        "must be a source, a tab and a target, got 'xxxx",
    ),
    "large": (
        "train --config=configs/pydoc_lm.py --config.data.path={tmp}/large", {},
        "has 100,000,000,000 bytes, and this machine's memory holds",
    ),
    "metadata": ("convert {tmp}/checkpoint {tmp}/out", {}, "must be a checkpoint of Orbax, got "),
    "deep": ("convert {tmp}/deep {tmp}/out", {}, "must be a checkpoint of Orbax, got "),
    "pipe": ("convert {tmp}/pipe {tmp}/out", {}, "is a pipe, socket or device"),
    "link": ("convert {tmp}/link {tmp}/out", {}, "is a link"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_end_in_one_line(name: str, tmp_path: Path) -> None:
    start = "from configs import digits\n\n\ndef get_config():\n    config = digits.get_config()\n"
    (tmp_path / "exit.py").write_text(f"{start}    raise SystemExit(0)\n")
    (tmp_path / "itself.py").write_text(
        f"{start}    config.mesh.more = config\n    return config\n"
    )
    (tmp_path / "long.tsv").write_text("x" * 10**6)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(10**11)
    for kind in ("checkpoint", "deep", "pipe", "link"):
        (tmp_path / kind / "variables").mkdir(parents=True)
        (tmp_path / kind / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "checkpoint" / "variables" / "_METADATA").write_text("{}")
    (tmp_path / "deep" / "variables" / "_METADATA").write_text("[" * 10_000)
    os.mkfifo(tmp_path / "pipe" / "variables" / "_METADATA")
    (tmp_path / "link" / "variables" / "_METADATA").symlink_to("/dev/zero")
    words, env, message = COMMANDS[name]
    before = {path.name for path in tmp_path.iterdir()}
    done = called(words.format(tmp=tmp_path), **env)
    assert done.returncode == 1, done.stderr
    *phases, line = done.stderr.splitlines()
    assert all(each.endswith(" …") or each.startswith("still ") for each in phases), done.stderr
    assert line.startswith("error: ")
    assert message in line
    assert len(line) < 1000
    # A folder that was tried before the work is empty.
    assert {path.name for path in tmp_path.iterdir()} - before <= {"out"}
    assert not list((tmp_path / "out").glob("*"))


def called(words: str, shell: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    line = f"{sys.executable} -m experiments.{words} {shell}"
    return subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=inherited | {"JAX_PLATFORMS": "cpu"} | env,
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
def test_streams_may_be_closed_or_ascii_or_end(tmp_path: Path) -> None:
    done = called("train --config.steps=x", "2>&-")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-1].startswith("error: config.steps must be a whole number")
    done = called("train --help", ">&-")
    assert done.returncode == 0
    assert "--config.task: what is learnt" in done.stderr
    done = called("train --help", "", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    ended = called("train --help", "> >(exec true)")  # A reader that reads nothing.
    assert "Traceback" not in ended.stderr
    done = called("train --help", "> /dev/full")
    assert done.returncode == 1
    assert done.stderr == f"error: No space left on device; {failures.FULL}\n"
