"""The log of a run: rows of metrics in a file of JSON lines, TensorBoard, and other trackers."""

import hashlib
import importlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from ml_collections import ConfigDict
from tensorboardX import SummaryWriter

from experiments.common import outputs, phases
from experiments.common.failures import RunError

METRICS, EVENTS, PROJECT = "metrics.jsonl", "tensorboard", "flax_mha"
Row = dict[str, Any]
# Writes numbers by name, for a step.
Write = Callable[[Mapping[str, float], int], object]


class Log:
    """The metrics of a run. Process 0 writes them.

    Args:
      path: the run's folder.
      config: the run's config.
      step: the step that training goes on from; rows beyond it, left by a process that was killed,
        are dropped.
      pending: the metrics of steps since the last row, as `pending` returned them.

    Attributes:
      rows: the rows.
      skipping: True if the last step of a seed was left out, as not finite.
    """

    def __init__(
        self, path: Path, config: ConfigDict, step: int = 0, pending: Iterable[Any] = ()
    ) -> None:
        self._file, self._config, self.skipping = path / METRICS, config, False
        self.rows = [row for row in read(path) if row["step"] <= step]
        self._pending: list[Any] = list(pending)
        self._writers: Sequence[Write] = ()
        self._closers: Sequence[Callable[[], object]] = ()
        if jax.process_index() == 0:
            path.mkdir(parents=True, exist_ok=True)
            self._open(path, step)

    def _open(self, path: Path, step: int) -> None:
        outputs.write(self._file, "".join(map(_line, self.rows)))
        events = SummaryWriter(str(path / EVENTS), purge_step=step + 1)

        def write(values: Mapping[str, float], step: int) -> None:
            for name, value in values.items():
                events.add_scalar(name, value, step)
            events.flush()

        opened = [TRACKERS[name](path, self._config) for name in named(self._config)]
        self._writers, self._closers = zip((write, events.close), *opened, strict=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for close in self._closers:
            close()

    def add(self, metrics: Any) -> None:
        """Take the metrics of a step, without waiting for the device."""
        self._pending.append(metrics)

    def pending(self) -> list[dict[str, list[float]]]:
        """Return the metrics of steps since the last row, for a checkpoint."""
        self._pending = [
            {name: np.atleast_1d(x).astype(np.float64).tolist() for name, x in each.items()}
            for each in jax.device_get(self._pending)
        ]
        return self._pending

    def take(self) -> dict[str, np.ndarray]:
        """Return the metrics [steps, seeds] since the last row."""
        each = self.pending()
        series = {name: np.stack([metrics[name] for metrics in each]) for name in each[0]}
        self._pending = []
        self.skipping = bool(series["skipped"][-1].any())
        return series

    def write(self, step: int, split: str, metrics: Mapping[str, np.ndarray]) -> None:
        """Add a row of values [seeds], as numbers if there is a single seed."""
        row = {name: _plain(x) for name, x in metrics.items()}
        self.rows.append({"step": step, "split": split, **row})
        if not self._writers:
            return
        with self._file.open("a") as file:
            file.write(_line(self.rows[-1]))
        values = {f"{split}/{name}": float(x.mean()) for name, x in metrics.items()}
        for name, x in metrics.items():
            values |= {f"{split}/{name}/{i}": float(y) for i, y in enumerate(x) if x.size > 1}
        for write in self._writers:
            write(values, step)


def read(path: Path) -> list[Row]:
    """Return the rows in a run's folder, without those that a killed process left unfinished."""
    file, rows = path / METRICS, []
    for line in file.read_text(errors="replace").splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
            rows.append({"step": int(row["step"]), "split": row["split"], **row})
        except (ValueError, KeyError, TypeError):
            phases.say(f"{file} has a damaged line, which is dropped: {line[:50]!r}")
    return rows


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _plain(x: np.ndarray) -> Any:
    """Return a number, or a list of several; None for those that are not finite."""
    values = [float(value) if math.isfinite(value) else None for value in x]
    return values[0] if len(values) == 1 else values


def named(config: ConfigDict) -> list[str]:
    """Return the trackers that config.report_to names, such as "wandb" or "wandb,mlflow"."""
    return [name.strip() for name in config.report_to.split(",") if name.strip()]


def _id(path: Path) -> str:
    """Return the same id for each start of one run."""
    return hashlib.sha256(str(path).encode()).hexdigest()[:16]


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RunError(f"config.report_to={name} needs it: pip install {name} ({error})") from error


def _wandb(path: Path, config: ConfigDict) -> tuple[Write, Callable[[], object]]:
    """Open a run of Weights & Biases, the same again when a run is resumed."""
    run = _import("wandb").init(
        project=PROJECT, name=path.name, id=_id(path), resume="allow", config=config.to_dict()
    )
    return lambda values, step: run.log(dict(values), step=step), run.finish


def _mlflow(path: Path, config: ConfigDict) -> tuple[Write, Callable[[], object]]:
    """Open a run of MLflow, in the place that its environment variables name (default: a file)."""
    mlflow = _import("mlflow")
    mlflow.set_experiment(PROJECT)
    before = mlflow.search_runs(filter_string=f"tags.workdir = '{_id(path)}'", output_format="list")
    mlflow.start_run(
        run_id=before[0].info.run_id if before else None, run_name=path.name,
        tags={"workdir": _id(path)},
    )  # fmt: skip
    return lambda values, step: mlflow.log_metrics(dict(values), step=step), mlflow.end_run


TRACKERS: dict[str, Callable[[Path, ConfigDict], tuple[Write, Callable[[], object]]]] = {
    "mlflow": _mlflow,
    "wandb": _wandb,
}
