import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from experiments.failures import RunError
from experiments.training import runs
from experiments.training.log import Log, progress


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
def test_a_mistyped_key_is_told_the_nearest(config: ConfigDict, key: str, nearest: str) -> None:
    with pytest.raises(RunError, match=f"no key '{key}'; the nearest is '{nearest}'"):
        runs.check_key(key, config)


def test_keys_that_exist_pass(config: ConfigDict) -> None:
    for key in (*runs.flatten(config.to_dict()), "model"):
        runs.check_key(key, config)


def begin(*arguments: Any) -> runs.Run:
    run = runs.open_run(*arguments)
    run.begin("hash of the data")
    return run


def test_a_new_folder_gets_the_config(
    config: ConfigDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (begin(None, config, {}) for _ in range(2))
    assert first.path != second.path
    assert first.path.parent == tmp_path / "runs"
    assert not first.resumed
    assert json.loads((first.path / "config.json").read_text()) == config.to_dict()


def test_an_empty_folder_becomes_a_run(config: ConfigDict, tmp_path: Path) -> None:
    assert not runs.open_run(tmp_path, config, {}).resumed
    assert not begin(tmp_path, config, {}).resumed
    assert runs.open_run(tmp_path, config, {}).resumed


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "run.json"])
def test_what_is_not_ours_is_left_alone(config: ConfigDict, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"model_type": "bert"}')
    with pytest.raises(RunError, match=r"not a run of experiments\.train.*new --workdir"):
        runs.open_run(tmp_path, config, {})
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == '{"model_type": "bert"}'


def test_a_file_is_no_folder(config: ConfigDict, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="must be a folder"):
        runs.open_run(tmp_path / "file", config, {})


def test_a_run_keeps_its_config(config: ConfigDict, tmp_path: Path) -> None:
    begin(tmp_path, config, {})
    other = config.copy_and_resolve_references()
    other.seed = 7  # a default that changed since: the run's own counts
    run = runs.open_run(tmp_path, other, {"steps": config.steps, "optimizer.b1": 0.9})
    assert run.config.to_dict() == config.to_dict()
    with pytest.raises(RunError, match=r"optimizer\.b1 is 0\.9 there, and 0\.5 was asked"):
        runs.open_run(tmp_path, config, {"optimizer.b1": 0.5})


def test_a_run_keeps_its_data(config: ConfigDict, tmp_path: Path) -> None:
    begin(tmp_path, config, {})
    with pytest.raises(RunError, match=r"have the SHA-256 hash of the data, those found now"):
        runs.open_run(tmp_path, config, {}).begin("another")


def test_the_mesh_may_change_with_the_machine(config: ConfigDict, tmp_path: Path) -> None:
    config.mesh.data, config.mesh.model = 2, 4
    begin(tmp_path, config, {})
    config.mesh.data, config.mesh.model = 8, 1
    assert runs.open_run(tmp_path, config, {}).config.mesh.data == 2
    run = runs.open_run(tmp_path, config, {"mesh.data": 8})
    assert (run.config.mesh.data, run.config.mesh.model) == (8, 4)
    # A run of a time when there were fewer keys.
    saved = json.loads((tmp_path / "config.json").read_text())
    del saved["mesh"]["fsdp"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert runs.open_run(tmp_path, config, {}).config.mesh.fsdp == 1


def test_the_log_forgets_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    with Log(tmp_path, 0) as log:
        for step in (1, 2, 3):
            log.write(step, "train", {"loss": np.asarray([step / 2])})
    with Log(tmp_path, 2) as log:
        log.write(3, "train", {"loss": np.asarray([0.25, 0.75])})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == [0.5, 1.0, [0.25, 0.75]]
    assert rows == log.rows


def test_without_a_terminal_progress_is_plain_lines(capfd: pytest.CaptureFixture[str]) -> None:
    with progress(10, 0) as show:
        show(1, "loss 1", "")
        show(2, "loss 0.5", "step 2: loss 0.5")
    assert capfd.readouterr() == ("step 2: loss 0.5\n", "")


def test_a_signal_asks_before_it_kills() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with runs.stoppable() as stop:
        assert not stop(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop(2)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is before
