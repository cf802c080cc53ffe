import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import digits
from experiments.runs import fields, rundir, signals
from experiments.runs.failures import RunError
from experiments.runs.log import Log
from experiments.runs.progress import shown
from experiments.runs.record import Saved


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("optimizer.learning_rat", "optimizer.learning_rate"),
        ("optimzer.learning_rate", "optimizer.learning_rate"),
        ("learning_rate", "optimizer.learning_rate"),
        ("model.heads", "model.num_heads"),
        ("step", "steps"),
    ],
)
def test_mistyped_key_names_the_nearest(config: ConfigDict, key: str, nearest: str) -> None:
    with pytest.raises(RunError, match=f"no key '{key}'; the nearest is '{nearest}'"):
        fields.check_key(key, config)


def test_keys_that_exist_pass(config: ConfigDict) -> None:
    for key in (*fields.flatten(config.to_dict()), "model"):
        fields.check_key(key, config)


def begin(*arguments: Any) -> rundir.Run:
    run = rundir.open_run(*arguments)
    run.begin("hash of the data")
    return run


def test_new_folder_gets_the_config(
    config: ConfigDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (begin(None, config, {}) for _ in range(2))
    assert first.path != second.path
    assert first.path.parent == tmp_path / "runs"
    assert not first.resumed
    assert json.loads((first.path / "config.json").read_text()) == config.to_dict()


def test_empty_folder_becomes_a_run(config: ConfigDict, tmp_path: Path) -> None:
    assert not rundir.open_run(tmp_path, config, {}).resumed
    assert not begin(tmp_path, config, {}).resumed
    assert rundir.open_run(tmp_path, config, {}).resumed


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "run.json"])
def test_foreign_folder_is_left_alone(config: ConfigDict, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"model_type": "bert"}')
    with pytest.raises(RunError, match=r"not a run of experiments\.train.*new --workdir"):
        rundir.open_run(tmp_path, config, {})
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == '{"model_type": "bert"}'


def test_file_as_workdir_raises(config: ConfigDict, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="must be a folder"):
        rundir.open_run(tmp_path / "file", config, {})


def test_run_keeps_its_config(config: ConfigDict, tmp_path: Path) -> None:
    begin(tmp_path, config, {})
    other = config.copy_and_resolve_references()
    other.seed = 7  # a changed default: the run's config counts
    run = rundir.open_run(tmp_path, other, {"steps": config.steps, "optimizer.b1": 0.9})
    assert run.config.to_dict() == config.to_dict()
    with pytest.raises(RunError, match=r"optimizer\.b1 is 0\.9 there, and 0\.5 was asked"):
        rundir.open_run(tmp_path, config, {"optimizer.b1": 0.5})


def test_run_with_keys_of_its_own_is_taken_up(config: ConfigDict, tmp_path: Path) -> None:
    config.more, config.mine = [1, [2, 3]], ConfigDict({"name": "x", "sizes": [4]})
    begin(tmp_path, config, {})
    own = fields.flatten(config.to_dict())
    assert rundir.open_run(tmp_path, config, own).config.to_dict() == config.to_dict()
    # Commands that have no config file, or that of the task, read it too.
    assert rundir.find_run(tmp_path).config.mine.sizes == [4]
    assert rundir.open_run(tmp_path, digits.get_config(), {}).config.more == [1, [2, 3]]
    with pytest.raises(RunError, match=r"mine\.name is 'x' there, and 'y' was asked for"):
        rundir.open_run(tmp_path, config, {"mine.name": "y"})
    for foreign in (7, {"more": 1}, "more", None):
        mark = json.loads((tmp_path / "run.json").read_text())
        (tmp_path / "run.json").write_text(json.dumps(mark | {"more": foreign}))
        with pytest.raises(RunError, match="no such key as 'mine"):
            rundir.find_run(tmp_path)


def test_failed_start_leaves_nothing(
    config: ConfigDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, value: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(rundir.files, "write_json", fail)
        with pytest.raises(OSError, match="No space"):
            begin(tmp_path / "run", config, {})
    assert not (tmp_path / "run").exists()
    assert not begin(tmp_path / "run", config, {}).resumed


def test_run_keeps_its_data(config: ConfigDict, tmp_path: Path) -> None:
    begin(tmp_path, config, {})
    with pytest.raises(RunError, match=r"have the SHA-256 hash of the data, those found now"):
        rundir.open_run(tmp_path, config, {}).begin("another")


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("jax_enable_x64", True, "set JAX_ENABLE_X64=False"),
        ("jax_threefry_partitionable", False, "set JAX_THREEFRY_PARTITIONABLE=True"),
        ("jax_default_prng_impl", "rbg", "set JAX_DEFAULT_PRNG_IMPL=threefry2x32"),
        ("jax_default_matmul_precision", "float32", "unset JAX_DEFAULT_MATMUL_PRECISION"),
    ],
)
def test_run_keeps_the_settings_of_its_draws(
    config: ConfigDict, tmp_path: Path, name: str, value: Any, remedy: str
) -> None:
    begin(tmp_path, config, {})
    before = getattr(jax.config, name)
    try:
        jax.config.update(name, value)
        with pytest.raises(RunError, match=f"begun under {name}={before!r}, .*; {remedy}$"):
            begin(tmp_path, config, {})
    finally:
        jax.config.update(name, before)
    assert begin(tmp_path, config, {}).resumed
    # A folder of strangers may say anything.
    mark = json.loads((tmp_path / "run.json").read_text())
    for odd in (7, {}, {name: before, "jax_other": 1}, None):
        (tmp_path / "run.json").write_text(json.dumps(mark | {"settings": odd}))
        assert begin(tmp_path, config, {}).resumed


def test_mesh_may_change_with_the_machine(config: ConfigDict, tmp_path: Path) -> None:
    config.mesh.data, config.mesh.model = 2, 4
    begin(tmp_path, config, {})
    config.mesh.data, config.mesh.model = 8, 1
    assert rundir.open_run(tmp_path, config, {}).config.mesh.data == 2
    run = rundir.open_run(tmp_path, config, {"mesh.data": 8})
    assert (run.config.mesh.data, run.config.mesh.model) == (8, 4)


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_log_drops_rows_after_the_checkpoint(config: ConfigDict, tmp_path: Path) -> None:
    with Log(tmp_path, config, None) as log:
        for step in (1, 2):
            log.write(step, "train", {"loss": np.asarray([step / 2])})
        saved = Saved(2, None, log.saved(2))
        log.write(3, "train", {"loss": np.asarray([7.0])})
    with Log(tmp_path, config, saved) as log:
        log.write(3, "train", {"loss": np.asarray([0.25, np.nan])})
    rows = logged(tmp_path)
    assert [row["loss"] for row in rows] == [0.5, 1.0, [0.25, None]]
    assert rows == log.rows


STATES = {
    "a partial last row": lambda good: good[:-9],
    "a blank line": lambda good: good + b"\n",
    "a blank line between": lambda good: good.replace(b"\n", b"\n\n", 1),
    "zeros": lambda good: good[:-20] + bytes(20),
    "bad UTF-8": lambda good: good[:-5] + b"\xff\xfe",
    "empty": lambda good: b"",
    "NaN": lambda good: good.replace(b"0.5", b"NaN"),
    "nested": lambda good: b"[" * 100_000,
}


@pytest.mark.parametrize("name", STATES)
def test_damaged_log_is_restored_from_the_checkpoint(
    config: ConfigDict, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    with Log(tmp_path, config, None) as log:
        for step in (1, 2):
            log.write(step, "train", {"loss": np.asarray([step / 2])})
        saved = Saved(2, None, log.saved(2))
    good = path.read_bytes()
    path.write_bytes(STATES[name](good))
    with Log(tmp_path, config, saved):
        assert path.read_bytes() == good
    # Every interrupted run leaves rows after the checkpoint's.
    expected = "" if name == "a blank line" else "metrics.jsonl was damaged, and is written anew"
    assert capsys.readouterr().out.startswith(expected)
    path.write_bytes(STATES[name](good))
    with Log(tmp_path, config, None):  # Before the first checkpoint.
        assert path.read_bytes() == b""


def test_log_beyond_a_missing_first_checkpoint_is_refused(
    config: ConfigDict, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 3}\n{"step": 6}\n')
    with Log(tmp_path, config, None):
        pass
    path.write_text('{"step": 3}\n{"step": 7}\n')
    with pytest.raises(RunError, match="no checkpoint, and its log reaches step 7; restore"):
        Log(tmp_path, config, None)
    os.remove(path)
    os.mkfifo(path)
    with pytest.raises(RunError, match="must be a file of its own"):
        Log(tmp_path, config, None)


def test_progress_without_terminal_is_plain_lines(capfd: pytest.CaptureFixture[str]) -> None:
    with shown(10, 0) as show:
        show(1, "loss 1", "")
        show(2, "loss 0.5", "step 2: loss 0.5")
    assert capfd.readouterr() == ("step 2: loss 0.5\n", "")


def test_first_signal_stops_and_second_kills() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with signals.stoppable() as stop:
        assert not stop(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop(2)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is before
