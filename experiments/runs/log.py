"""The log of a run: metrics of steps, and rows of them in files.

All of it is part of each checkpoint too: a run that was cut off has the log of one that was not.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments.runs import files, hosts, record, writers
from experiments.runs.failures import RunError
from experiments.runs.rundir import METRICS

Row = dict[str, Any]


class Log:
    """The metrics of a run: JSON lines and TensorBoard events, written by process 0.

    Args:
      path: the run's folder.
      config: the run's config.
      saved: the checkpoint that it starts from, if any; rows beyond it, left by a run that was cut
        off, are dropped.

    Attributes:
      rows: the rows.
      skipping: True if the last step of a seed was left out, as not finite.
    """

    def __init__(self, path: Path, config: ConfigDict, saved: record.Saved | None) -> None:
        self._file, self._config, self.skipping = path / METRICS, config, False
        log = saved.log if saved else {"rows": [], "pending": []}
        self.rows: list[Row] = list(log["rows"])
        self._pending: list[Any] = list(log["pending"])  # of each step since the last row

        def open_writers() -> list[writers.Writer]:
            text = "".join(_line(row) for row in self.rows)
            record.check_log(self._file, text, config.checkpoint_every if not saved else 0)
            others = writers.others(path, config)
            files.write(self._file, text)
            return [writers.TensorBoard(path / "tensorboard", saved.step if saved else 0), *others]

        self._writers = hosts.on_first(open_writers) or []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers:
            writer.close()

    def add(self, metrics: Any) -> None:
        """Take the metrics of a step, without waiting for the device."""
        self._pending.append(metrics)

    def take(self, step: int) -> dict[str, np.ndarray]:
        """Return the metrics [steps, seeds] since the last call, up to this step."""
        series = self._series(step)
        self._pending = []
        return series

    def write(self, step: int, split: str, metrics: Mapping[str, np.ndarray]) -> None:
        """Add a row of values [seeds], as numbers if there is a single seed."""
        row = {"step": step, "split": split, **{name: _plain(x) for name, x in metrics.items()}}
        self.rows.append(row)
        if not self._writers:
            return
        files.append(self._file, _line(row))
        for name, x in metrics.items():
            each = [(f"{name}/{i}", value) for i, value in enumerate(x if x.size > 1 else ())]
            for event, value in [(name, x.mean()), *each]:
                for writer in self._writers:
                    writer.log_scalar(f"{split}/{event}", float(value), step=step)

    def saved(self, step: int) -> Mapping[str, Any]:
        """Return a checkpoint's part: the rows, then on the disk, and steps that are in none."""
        if self._pending:
            self._series(step)
        if self._writers:
            files.append(self._file, "")  # Waits until all lines are on the disk.
        pending = [{name: x.tolist() for name, x in each.items()} for each in self._pending]
        return {"rows": list(self.rows), "pending": pending}

    def _series(self, step: int) -> dict[str, np.ndarray]:
        """Return the metrics [steps, seeds] since the last row."""
        self._pending = [
            {name: np.atleast_1d(x).astype(np.float64) for name, x in each.items()}
            for each in jax.device_get(self._pending)
        ]
        series = {name: np.stack([x[name] for x in self._pending]) for name in self._pending[0]}
        self.skipping = bool(series["skipped"][-1].any())
        self._check_skipped(series, step)
        return series

    def _check_skipped(self, series: Mapping[str, np.ndarray], step: int) -> None:
        """Check that no seed left out too many steps in a row, up to this one."""
        bad = np.argwhere(series["skipped"] >= self._config.max_skipped)
        if len(bad):
            at, seed = bad[0]
            count = int(series["skipped"][at, seed])
            first = step - len(series["skipped"]) + 1 + at - count + 1
            raise RunError(
                f"not finite at step {first} of seed {self._config.seed + seed}, nor at any of the "
                f"{count} steps from there (config.max_skipped), which were left out: loss "
                f"{series['loss'][at, seed]}, gradient norm {series['gradient_norm'][at, seed]}; "
                f"nothing of them was saved; try a smaller config.optimizer.learning_rate or a "
                f"longer config.optimizer.warmup"
            )


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _plain(x: np.ndarray) -> Any:
    """Return numbers for JSON, with None for a number that is not finite."""
    values = [float(v) if math.isfinite(v) else None for v in x]
    return values[0] if len(values) == 1 else values
