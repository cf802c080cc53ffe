"""A run's folder is untrusted: it resumes, starts, or is refused in one line."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from experiments import tasks
from experiments.runs import fields, files, folders, integrity, lock, rundir
from experiments.runs.failures import RunError
from experiments.runs.fingerprint import fingerprint

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def run(config: ConfigDict, tmp_path: Path) -> Iterator[Path]:
    """Return a run that has begun."""
    rundir.open_run(tmp_path / "run", config, {}).begin("hash")
    yield tmp_path / "run"
    lock.release(tmp_path / "run")


def refused(path: Path, config: ConfigDict, overrides: dict[str, Any] | None = None) -> str:
    """Return the one-line refusal of a folder, and check that the folder did not change."""
    before = {p.name: os.lstat(p).st_mtime_ns for p in path.iterdir()}
    with pytest.raises(RunError) as caught:
        rundir.open_run(path, config, overrides or {})
    assert before == {p.name: os.lstat(p).st_mtime_ns for p in path.iterdir()}
    (line,) = str(caught.value).splitlines()
    assert len(line) < 1000
    assert line.isprintable()
    return line


def forge(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Edit a run's config, and make its mark agree."""
    config, mark = (json.loads((path / name).read_text()) for name in ("config.json", "run.json"))
    config = change(config) or config
    (path / "config.json").write_text(json.dumps(config))
    (path / "run.json").write_text(json.dumps(mark | {"config": integrity.digest(config)}))


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of a dotted key."""
    *parents, last = key.split(".")
    for name in parents:
        tree = tree[name]
    tree[last] = value


CONTENTS = [
    "", " ", "{", "[]", "null", "7", '"text"', "{}", "NaN", '{"a": NaN}', "\0" * 90,
    "[" * 100_000, '{"a": ' * 100_000, "1" * 5000, '{"program": "experiments.train"}', "\ud800x",
    "import os; os.system('false')", '{"program": ["experiments.train"]}', "x" * (files.MOST + 9),
    '{"program": 1}', '{"program": "experiments.train", "format": 1}',
    '{"program": "experiments.train", "format": 2}',
    '{"program": "experiments.train", "format": 2, "data": "\\n", "config": []}',
]  # fmt: skip


@pytest.mark.parametrize("name", ["run.json", "config.json"])
def test_foreign_file_in_folder_is_refused(config: ConfigDict, run: Path, name: str) -> None:
    for content in CONTENTS:
        (run / name).write_bytes(content.encode(errors="surrogatepass"))
        assert str(run) in refused(run, config), content[:40]
    (run / name).unlink()
    (run / name).mkdir()
    assert name in refused(run, config)


ODD = {
    "a link": lambda path: path.symlink_to(path.parent.parent / "mine"),
    "a link to a folder": lambda path: path.symlink_to(path.parent.parent),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a pipe": os.mkfifo,
}
PLACES = (
    "run.json", "config.json", "metrics.jsonl", "lock", "tensorboard", "checkpoints",
    "checkpoints.damaged", "checkpoints/6/run/metadata", "checkpoints/6/state", "profile",
    "tensorboard/events.out.tfevents.1", "curves.png",
    *(files.ASIDE + name for name in ("metrics.jsonl", "run.json", "curves.png", "attention.png")),
)  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("place", PLACES)
def test_links_and_special_files_are_named_and_left_alone(
    config: ConfigDict, run: Path, place: str, kind: str
) -> None:
    mine = run.parent / "mine"
    mine.write_text("of the user")
    path = run / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
    ODD[kind](path)
    line = refused(run, config)
    assert repr(place) in line
    assert "nothing was read" in line
    with pytest.raises(RunError, match="must hold files and folders alone"):
        rundir.find_run(run)
    assert mine.read_text() == "of the user"


def test_writes_do_not_follow_links(tmp_path: Path) -> None:
    """Even if the link appears after the folder was checked."""
    mine, path = tmp_path / "mine", tmp_path / "metrics.jsonl"
    mine.write_text("of the user")
    path.with_name(files.ASIDE + path.name).symlink_to(mine)
    files.write(path, "first\n")
    files.append(path, "second\n")
    assert path.read_text() == "first\nsecond\n"
    path.unlink()
    path.symlink_to(mine)
    with pytest.raises(OSError, match="symbolic link"):
        files.append(path, "third\n")
    files.write(path, "fourth\n")
    assert (mine.read_text(), path.read_text()) == ("of the user", "fourth\n")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match=r"No such device|not a regular file"):
        files.append(path, "waits for nobody")


def test_outputs_replace_files_alone(tmp_path: Path) -> None:
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (pipe, folder, Path("/dev/full")):
        before = path.lstat()
        with pytest.raises(RunError, match=r"must be a file that can be written, got .*: not"):
            files.try_output(path, "--figure")
        with pytest.raises(FileExistsError, match="not a regular file"):
            files.write(path, "text")
        assert (path.lstat().st_mode, path.lstat().st_ino) == (before.st_mode, before.st_ino)
    assert files.try_output(tmp_path / "new" / "a.png", "--figure") == tmp_path / "new" / "a.png"
    assert not list((tmp_path / "new").iterdir())


def test_edited_config_is_refused(config: ConfigDict, run: Path) -> None:
    for key in fields.flatten(config.to_dict()):
        edited = config.to_dict()
        put(edited, key, [])
        (run / "config.json").write_text(json.dumps(edited))
        assert "is not what the run began with" in refused(run, config)
    (run / "config.json").unlink()
    assert "config.json can't be read: No such file" in refused(run, config)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("task", "__import__('os')", "task must be one of digits"),
        ("task", ["digits"], "task must be one of digits"),
        ("task", "text", "is no config of a run"),
        ("steps", "9", "steps must be a whole number from 1 to 2,147,483,647, got '9'"),
        ("steps", True, "steps must be a whole number"),
        ("steps", 1.5, "steps must be a whole number"),
        ("steps", None, "steps must be a whole number"),
        ("steps", 0, "steps must be a whole number from 1"),
        ("optimizer", 3, "no such key as 'optimizer'"),
        ("optimizer.b1", "0.9", "optimizer.b1 must be a number in [0, 1)"),
        ("model.kernel", 1, "model.kernel must be auto, or a kernel"),
        ("model.kernel", {"a": 1}, "model.kernel is missing"),
        ("model.extra", 1, "no such key as 'model.extra'"),
        ("mesh.data", "x", "mesh.data must be a whole number"),
    ],
)
def test_forged_config_is_checked_against_the_task(
    config: ConfigDict, run: Path, key: str, value: Any, message: str
) -> None:
    forge(run, lambda found: put(found, key, value))
    assert message in refused(run, config)


def test_missing_key_is_named(config: ConfigDict, run: Path) -> None:
    forge(run, lambda found: found["optimizer"].pop("b1") and None)
    assert "optimizer.b1 is missing" in refused(run, config)


def test_file_named_only_by_the_folder_is_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("something long enough to train on " * 100)
    config = fields.EXAMPLES["text"]()
    run = tmp_path / "run"
    rundir.open_run(run, config, {}).begin(fingerprint(tasks.make(config)))
    lock.release(run)
    forge(run, lambda found: found["data"].update(path=str(secret)))
    assert "only its owner can say that it be read" in refused(run, config)
    with pytest.raises(RunError, match="only its owner"):
        rundir.find_run(run)
    named = {"data.path": str(secret)}
    assert rundir.open_run(run, config, named).config.data.path == str(secret)
    assert rundir.find_run(run, named).resumed


def test_interrupted_start_starts_again(
    config: ConfigDict, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "run.json").unlink()
    (run / "checkpoints").rmdir()  # It is created last.
    (run / (files.ASIDE + "run.json")).write_text("{")
    found = rundir.open_run(run, config, {})
    assert not found.resumed
    assert "the start of" in capsys.readouterr().out
    found.begin("hash")
    assert rundir.open_run(run, config, {}).resumed


def half(path: Path) -> None:
    """Begin to write, and meet a full disk."""
    with files.replacing(path) as file:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space")


def test_files_are_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write(path, "first")
    with pytest.raises(OSError, match="No space"):
        half(path)
    assert path.read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    with pytest.raises(ValueError, match="JSON compliant"):
        files.write_json(path, {"a": float("nan")})
    assert path.read_text() == "first"


@pytest.mark.parametrize(
    "name", ["gs://bucket/run", "s3://bucket/run", "gs:/bucket", "file:///tmp/run"]
)
def test_bucket_url_is_refused(config: ConfigDict, name: str) -> None:
    with pytest.raises(RunError, match=r"must be a folder of a file system, and \w+:// is none"):
        rundir.open_run(name, config, {})
    with pytest.raises(RunError, match="is none"):
        folders.result_folder(name, "plan")


def test_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folders.local("~/run") == tmp_path / "run"
    assert folders.result_folder("~/run", "plan") == tmp_path / "run"
    with pytest.raises(RunError, match="a user who is not here"):
        folders.local("~nobody-of-that-name/run")


HOLDER = """
import sys
from pathlib import Path
from experiments.runs import lock
assert lock.hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_folder_is_locked_until_its_process_dies(config: ConfigDict, run: Path) -> None:
    lock.release(run)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run)], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert holder.stdout.readline() == "held\n"
        found = rundir.open_run(run, config, {})
        with pytest.raises(RunError, match=f"is being trained by process {holder.pid} on .*; wait"):
            found.begin("hash")
    finally:
        holder.kill()
        holder.communicate()
    found.begin("hash")


def test_second_start_in_a_new_folder_is_refused(config: ConfigDict, tmp_path: Path) -> None:
    first, second = (rundir.open_run(tmp_path / "run", config, {}) for _ in range(2))
    first.begin("hash")
    with pytest.raises(RunError, match="another run has just begun in"):
        second.begin("hash")
