"""The metrics of a run: means of training steps, and those of the test data."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments.runs.log import LogFile, check_skipped
from experiments.runs.record import Saved
from experiments.tasks.task import Batch, Params
from experiments.trainer.mesh import Metrics, Program


class Log(LogFile):
    """The log of a run, in which the metrics of steps become rows of means.

    Args:
      path: the run's folder.
      config: the run's config.
      saved: the checkpoint that the run starts from, if any.

    Attributes:
      skipping: True if the last step of a seed was left out, as not finite.
    """

    def __init__(self, path: Path, config: ConfigDict, saved: Saved | None) -> None:
        super().__init__(path, config, saved)
        self.skipping = False
        # The metrics of each step since the last row: as they come from the device, and fetched.
        self._pending: list[Metrics] = []
        self._fetched: list[dict[str, np.ndarray]] = [
            {name: np.asarray(x, np.float64) for name, x in each.items()}
            for each in (saved.log["pending"] if saved else ())
        ]

    def add(self, metrics: Metrics) -> None:
        """Take the metrics of a step, without waiting for the device."""
        self._pending.append(metrics)

    def means(self, step: int) -> Metrics:
        """Write a row with the means [seeds] of the steps since the last one, and return them."""
        series = self._series(step)
        self._fetched = []
        taken = series.pop("skipped") == 0
        with np.errstate(invalid="ignore"):  # Without a step the mean is NaN.
            means = {
                name: np.where(taken, x, 0).sum(0) / taken.sum(0) for name, x in series.items()
            }
        means["skipped"] = (~taken).sum(0).astype(np.float64)
        self.write(step, "train", means)
        return means

    def saved(self, step: int) -> Mapping[str, Any]:
        """Return the part of the log that a checkpoint keeps: rows, and steps that are in none."""
        if self._pending or self._fetched:
            self._series(step)
        self.flush()
        pending = [{name: x.tolist() for name, x in each.items()} for each in self._fetched]
        return {"rows": list(self.rows), "pending": pending}

    def _series(self, step: int) -> dict[str, np.ndarray]:
        """Return the metrics [steps, seeds] since the last row."""
        for each in jax.device_get(self._pending):
            self._fetched.append({n: np.atleast_1d(x).astype(np.float64) for n, x in each.items()})
        self._pending = []
        series = {name: np.stack([e[name] for e in self._fetched]) for name in self._fetched[0]}
        check_skipped(series, step, self.config)
        self.skipping = bool(series["skipped"][-1].any())
        return series


def evaluate(program: Program, params: Params, batches: Sequence[Batch]) -> Metrics:
    """Return the test metrics [seeds]: means over all rows that are not padding."""
    each = jax.device_get([program.evaluate(params, batch) for batch in batches])
    total = jax.tree.map(lambda *x: np.atleast_1d(np.sum(x, axis=0)), *each)
    count = total.pop("count")
    return {name: x / count for name, x in total.items()}
