"""Metrics for wandb and mlflow, with stand-ins for the used parts of both."""

import importlib
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from experiments.runs import writers
from experiments.runs.failures import RunError
from experiments.runs.log import Log
from experiments.runs.record import Saved


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Record the calls of both stand-in modules."""
    told: dict[str, list[Any]] = {"wandb": [], "mlflow": []}

    class Backend:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            told["wandb"].append((args, kwargs))

        def log_scalar(self, event: str, value: float, **kwargs: Any) -> None:
            told["wandb"].append((event, value, kwargs))

        def close(self) -> None:
            told["wandb"].append("closed")

    mlflow = types.SimpleNamespace(
        set_experiment=lambda name: None,
        search_runs=lambda **kwargs: [
            types.SimpleNamespace(info=types.SimpleNamespace(run_id="found"))
            for _ in told["mlflow"][:1]
        ],
        start_run=lambda **kwargs: told["mlflow"].append(kwargs),
        log_metric=lambda *args, **kwargs: told["mlflow"].append((*args, kwargs)),
        end_run=lambda: told["mlflow"].append("closed"),
    )
    stand_ins = {
        "wandb": types.SimpleNamespace(), "mlflow": mlflow,
        "metrax.logging": types.SimpleNamespace(WandbBackend=Backend),
    }  # fmt: skip
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name: stand_ins.get(name) or real(name))
    return told


def test_both_trackers_receive_the_log(
    told: dict[str, list[Any]], config: ConfigDict, tmp_path: Path
) -> None:
    config.report_to = "wandb, mlflow"
    for saved in (None, Saved(3, None, {"rows": [], "pending": []})):
        with Log(tmp_path, config, saved) as log:
            log.write(3, "test", {"loss": np.array([0.5]), "accuracy": np.array([0.25, 0.75])})
    numbers = [
        ("test/loss", 0.5), ("test/accuracy", 0.5), ("test/accuracy/0", 0.25),
        ("test/accuracy/1", 0.75),
    ]  # fmt: skip
    wanted = [(*number, {"step": 3}) for number in numbers]
    (args, kwargs), *rows = told["wandb"]
    assert args == ("flax_mha", tmp_path.name)
    assert kwargs["config"] == config.to_dict()
    assert kwargs["resume"] == "allow"
    assert rows == [*wanted, "closed", (args, kwargs), *wanted, "closed"]  # The same id again.
    begun, *rows = told["mlflow"]
    assert begun["run_id"] is None
    again = rows[len(wanted) + 1]
    assert again == {**begun, "run_id": "found"}
    assert rows == [*wanted, "closed", again, *wanted, "closed"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_no_tracker_is_imported_unless_configured(config: ConfigDict, tmp_path: Path) -> None:
    with Log(tmp_path, config, None):
        pass
    assert not {"wandb", "mlflow", "metrax"} & {*sys.modules}


def test_events_are_written_while_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By decades, at which the thread of tensorboardX's own writer dies and is waited for."""
    events = writers.TensorBoard(tmp_path / "tensorboard", 0)
    (path,) = (tmp_path / "tensorboard").iterdir()
    time.sleep(1.0)  # Such a thread waits with a timeout by now.
    monkeypatch.setattr(time, "time", lambda: 1e9)
    for step in range(1, 100):
        events.log_scalar("test/loss", step / 2, step=step)
    threads = [thread for thread in threading.enumerate() if "Event" in type(thread).__name__]
    assert not [thread for thread in threads if "tensorboardX" in type(thread).__module__]
    size = path.stat().st_size
    assert size > 99 * 20
    events.close()
    assert path.stat().st_size == size


@pytest.mark.parametrize(
    ("asked", "message"),
    [("mlflow", "needs the package mlflow: pip install mlflow"),
     ("wandb", "needs the package wandb: pip install wandb")],
)  # fmt: skip
def test_missing_tracker_raises(
    asked: str, message: str, config: ConfigDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, asked, None)  # Makes its import fail.
    config.report_to = asked
    with pytest.raises(RunError, match=message):
        writers.check(config)
    with pytest.raises(RunError, match=message):
        Log(tmp_path, config, None)
    assert not (tmp_path / "metrics.jsonl").exists()
