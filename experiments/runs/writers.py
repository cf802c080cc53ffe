"""Writers of metrics beside `metrics.jsonl`: TensorBoard, and others that config.report_to names.

All are loggers of metrax (`metrax.logging.LoggingBackend`), whose own for Weights & Biases is taken
as it is; another one is a class with two methods and a line in `OTHERS`.
"""

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ml_collections import ConfigDict
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from experiments.runs.failures import RunError
from experiments.runs.integrity import digest

NAME = "flax_mha"  # of the project, or experiment, there


class Writer(Protocol):
    """The protocol of metrax."""

    def log_scalar(self, event: str, value: float, **kwargs: Any) -> None:
        """Write a number by name, with its `step=`."""

    def close(self) -> None:
        """Write the rest."""


class TensorBoard:
    """TensorBoard events in a folder.

    Events after a step, left by a run that was cut off, are dropped; the backend of metrax can't.
    They are written by no other thread, which could die and be waited for.
    """

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(exist_ok=True)
        # Names go by seconds, in which two starts may fall.
        self._events = EventsWriter(str(folder / "events"), f".{step}")
        self.close = self._events.close
        self._write(step + 1, session_log=SessionLog(status=SessionLog.START))

    def log_scalar(self, event: str, value: float, **kwargs: Any) -> None:
        """See `Writer`."""
        self._write(kwargs["step"], summary=scalar(event, value))

    def _write(self, step: int, **content: Any) -> None:
        self._events.write_event(Event(step=step, wall_time=time.time(), **content))
        self._events.flush()


class MLflow:
    """A run of MLflow, in the place that its environment variables name (default: a file here)."""

    def __init__(self, path: Path, config: ConfigDict) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment(NAME)
        found = self._mlflow.search_runs(
            filter_string=f"tags.workdir = '{_id(path)}'", output_format="list"
        )
        self._mlflow.start_run(
            run_id=found[0].info.run_id if found else None, run_name=path.name,
            tags={"workdir": _id(path)},
        )  # fmt: skip

    def log_scalar(self, event: str, value: float, **kwargs: Any) -> None:
        """See `Writer`."""
        self._mlflow.log_metric(event, value, step=kwargs["step"])

    def close(self) -> None:
        """See `Writer`."""
        self._mlflow.end_run()


def _wandb(path: Path, config: ConfigDict) -> Writer:
    logging = importlib.import_module("metrax.logging")
    backend: Writer = logging.WandbBackend(
        NAME, path.name, id=_id(path), resume="allow", config=config.to_dict()
    )
    return backend


OTHERS: dict[str, Callable[[Path, ConfigDict], Writer]] = {"mlflow": MLflow, "wandb": _wandb}


# Modules that each needs, by the packages that bring them.
NEEDED = {
    "mlflow": {"mlflow": "mlflow"}, "wandb": {"wandb": "wandb", "google-metrax": "metrax.logging"},
}  # fmt: skip


def named(value: str) -> list[str]:
    """Return the names in a value of config.report_to, such as "wandb" or "wandb,mlflow"."""
    return [name.strip() for name in value.split(",") if name.strip()]


def check(config: ConfigDict) -> None:
    """Check that the trackers of config.report_to are installed."""
    for name in named(config.report_to):
        for package, module in NEEDED[name].items():
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise RunError(
                    f"config.report_to needs the package {package}: pip install {package} ({error})"
                ) from error


def others(path: Path, config: ConfigDict) -> list[Writer]:
    """Return the writers that config.report_to names, the same again for a resumed run."""
    check(config)
    return [OTHERS[name](path, config) for name in named(config.report_to)]


def _id(path: Path) -> str:
    """Return the same id for each start of one run."""
    return digest(str(path))[:16]
