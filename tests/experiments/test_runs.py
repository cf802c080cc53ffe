"""The folder of a run, its config, its log, its checkpoints and its trackers."""

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from experiments.common.failures import RunError
from experiments.runs import config as run_config
from experiments.runs import folders, log
from experiments.runs.config import Asked
from experiments.runs.log import Log
from experiments.trainer.checkpoints import Checkpoints

DATA = "the hash of the data"


def begin(workdir: Any, config: ConfigDict, **named: Any) -> folders.Run:
    run = folders.open_run(workdir, Asked(config, named))
    run.begin(DATA)
    return run


def test_new_folder_gets_the_config(
    config: ConfigDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (begin(None, config) for _ in range(2))
    assert first.path != second.path
    assert first.path.parent == tmp_path / "runs"
    assert first.began is None
    assert json.loads((first.path / "config.json").read_text()) == config.to_dict()


def test_run_keeps_its_config_but_not_its_mesh(config: ConfigDict, tmp_path: Path) -> None:
    begin(tmp_path, config)
    other = config.copy_and_resolve_references()
    other.seed = 7  # a changed default, which the command line doesn't name
    named = {"steps": config.steps, "optimizer.b1": 0.9, "mesh.model": 2}
    run = folders.open_run(str(tmp_path), Asked(other, named))
    assert (run.config.seed, run.config.mesh.model) == (config.seed, 2)
    with pytest.raises(RunError, match=r"optimizer\.b1 is 0\.9 there, and 0\.5 was asked for"):
        folders.open_run(str(tmp_path), Asked(other, {"optimizer.b1": 0.5}))
    with pytest.raises(RunError, match=f"have the SHA-256 {DATA}, those found now others"):
        run.begin("others")


def test_run_keeps_the_weights_that_it_began_with(config: ConfigDict, tmp_path: Path) -> None:
    run = folders.open_run(str(tmp_path), Asked(config, {}))
    assert run.begin(DATA, "/runs/a") == "/runs/a"
    run = folders.find_run(tmp_path)
    assert run.begin(DATA) == "/runs/a"
    with pytest.raises(RunError, match="began with the weights of /runs/a, got --weights=/runs/b"):
        run.begin(DATA, "/runs/b")


def test_folders_that_are_no_run_are_left_alone(config: ConfigDict, tmp_path: Path) -> None:
    begin(tmp_path, config)
    (tmp_path / "run.json").unlink()  # A start that was cut off begins anew.
    assert begin(tmp_path, config).began is None
    assert folders.find_run(tmp_path).began["data"] == DATA
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RunError, match=r"damaged config\.json or run\.json .*; restore it"):
        folders.find_run(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_text("mine")
    with pytest.raises(
        RunError, match=r"must be the folder of a run, got .*; choose another folder"
    ):
        begin(str(other), config)
    assert [path.name for path in other.iterdir()] == ["metrics.jsonl"]


def test_second_process_in_one_folder_is_refused(config: ConfigDict, tmp_path: Path) -> None:
    program = (
        "import pathlib, sys; from experiments.runs import folders; "
        "folders._lock(pathlib.Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:  # fmt: skip
        other.stdout.readline()
        with pytest.raises(RunError, match=r"another process trains in .*; wait for its end"):
            begin(tmp_path, config)
        other.kill()
    assert begin(tmp_path, config).began is None  # The lock ended with the process.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "config.steps must be a whole number from 1, got 0"),
        ({"seed": 2**32 - 1, "seeds": 2}, "must be from 0 to 4294967294 for config.seeds=2"),
        ({"optimizer.accumulate": 5}, "a multiple of config.optimizer.accumulate=5, got 6; try 10"),
        ({"report_to": "wandb, foo"}, "must be some of mlflow, wandb, got 'foo'"),
    ],
)
def test_configs_are_checked(config: ConfigDict, changes: dict[str, Any], message: str) -> None:
    run_config.check(config)
    config.update_from_flattened_dict(changes)
    with pytest.raises(RunError, match=message):
        run_config.check(config)


def test_log_drops_rows_beyond_its_checkpoint_and_damaged_lines(
    config: ConfigDict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Log(tmp_path, config) as kept:
        for step in (1, 2, 3):
            row = {"loss": np.array([1 / step]), "norm": np.array([np.nan])}
            kept.write(step, "train", row)
        kept.add({"skipped": jnp.int32(0)})
        pending = json.loads(json.dumps(kept.pending()))
    with (tmp_path / log.METRICS).open("a") as file:
        file.write('{"step": 4, "spl')
    with Log(tmp_path, config, 2, pending) as again:
        assert [row["step"] for row in again.rows] == [1, 2]
        again.add({"skipped": jnp.int32(1)})
        assert again.take()["skipped"].tolist() == [[0], [1]]
    assert "has a damaged line, which is dropped" in capsys.readouterr().out
    assert log.read(tmp_path) == [
        {"step": step, "split": "train", "loss": 1 / step, "norm": None} for step in (1, 2)
    ]


def tracker(calls: list[Any]) -> types.SimpleNamespace:
    """Return a stand-in for the parts of wandb and of mlflow that are used."""
    return types.SimpleNamespace(
        init=lambda **options: calls.append(options) or tracker(calls),
        log=lambda values, step: calls.append((step, values)),
        finish=lambda: calls.append("end"),
        set_experiment=lambda name: None,
        search_runs=lambda **_: [
            types.SimpleNamespace(info=types.SimpleNamespace(run_id="earlier"))
        ] * bool(calls),
        start_run=lambda **options: calls.append(options),
        log_metrics=lambda values, step: calls.append((step, values)),
        end_run=lambda: calls.append("end"),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_trackers_receive_the_log(
    name: str, config: ConfigDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setitem(sys.modules, name, tracker(calls))
    config.report_to = name
    values = {"test/loss": 0.5, "test/accuracy": 0.5, "test/accuracy/0": 0.25}
    for _ in range(2):
        with Log(tmp_path, config) as kept:
            row = {"loss": np.array([0.5]), "accuracy": np.array([0.25, 0.75])}
            kept.write(3, "test", row)
    opened, written, end, reopened, *_ = calls
    assert written == (3, values | {"test/accuracy/1": 0.75})
    assert end == "end"
    monkeypatch.setitem(sys.modules, name, None)  # Makes its import fail.
    with pytest.raises(RunError, match=f"report_to={name} needs it: pip install {name}"):
        Log(tmp_path, config)
    if name == "wandb":
        assert opened["id"] == reopened["id"]
        assert (opened["resume"], opened["config"]) == ("allow", config.to_dict())
    else:
        assert (opened["run_id"], reopened["run_id"]) == (None, "earlier")
        assert opened["tags"] == reopened["tags"]


def test_best_checkpoint_outlives_a_restart(tmp_path: Path) -> None:
    """Orbax 0.12.8 takes NaN for the best, and forgets losses at the end of the process."""
    losses = {1: 0.4, 2: 0.1, 3: float("nan"), 4: None, 5: 0.3, 6: 0.2, 7: None}
    for steps in ((1, 2, 3, 4), (5, 6, 7)):
        with Checkpoints(tmp_path, keep_last=1, keep_best=1) as checkpoints:
            for step in steps:
                data = types.SimpleNamespace(get_state=lambda: {})
                checkpoints.save(step, {"x": jnp.arange(4)}, data, [], losses[step])
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"2", "7"}
