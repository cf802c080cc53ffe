"""The log of a run: metrics of steps, and rows of them in files.

All of it is part of each checkpoint too: a run that was cut off has the log of one that was not.
"""

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments.runs import failures, files, hosts, writers
from experiments.runs.failures import RunError
from experiments.runs.record import Saved
from experiments.runs.rundir import METRICS

Row = dict[str, Any]
MOST = 2**28  # bytes of a log that is read


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

    def __init__(self, path: Path, config: ConfigDict, saved: Saved | None) -> None:
        self._file, self._config, self.skipping = path / METRICS, config, False
        log = saved.log if saved else {"rows": [], "pending": []}
        self.rows: list[Row] = list(log["rows"])
        # The metrics of each step since the last row: as they come from the device, and fetched.
        self._pending: list[Any] = []
        self._fetched: list[dict[str, np.ndarray]] = [
            {name: np.asarray(x, np.float64) for name, x in each.items()} for each in log["pending"]
        ]
        self._events: writers.TensorBoard | None = None
        self._others: list[writers.Writer] = []
        refused = None
        if jax.process_index() == 0:
            text = "".join(_line(row) for row in self.rows)
            refused = _differs(self._file, text, config.checkpoint_every if not saved else 0)
            try:
                self._others = [] if refused else writers.others(path, config)
            except Exception as error:  # Any error of theirs about an address or a login.
                refused = failures.describe(error)
        hosts.all_begin(refused)
        if jax.process_index() == 0:
            files.write(self._file, text)
            self._events = writers.TensorBoard(path / "tensorboard", saved.step if saved else 0)

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
        self._fetched = []
        return series

    def write(self, step: int, split: str, metrics: Mapping[str, np.ndarray]) -> None:
        """Add a row of values [seeds], as numbers if there is a single seed."""
        values = {name: _plain(x) for name, x in metrics.items()}
        row = {"step": step, "split": split, **values}
        self.rows.append(row)
        if self._events is None:
            return
        files.append(self._file, _line(row))
        for name, x in metrics.items():
            each = [(f"{name}/{i}", value) for i, value in enumerate(x if x.size > 1 else ())]
            for event, value in [(name, x.mean()), *each]:
                for writer in self._writers:
                    writer.log_scalar(f"{split}/{event}", float(value), step=step)
        self._events.flush()

    def saved(self, step: int) -> Mapping[str, Any]:
        """Return a checkpoint's part: the rows, then on the disk, and steps that are in none."""
        if self._pending or self._fetched:
            self._series(step)
        if self._events is not None:
            self._events.flush()
            files.append(self._file, "")  # Waits until all lines are on the disk.
        pending = [{name: x.tolist() for name, x in each.items()} for each in self._fetched]
        return {"rows": list(self.rows), "pending": pending}

    @property
    def _writers(self) -> list[writers.Writer]:
        return [*self._others] if self._events is None else [self._events, *self._others]

    def _series(self, step: int) -> dict[str, np.ndarray]:
        """Return the metrics [steps, seeds] since the last row."""
        for each in jax.device_get(self._pending):
            self._fetched.append({n: np.atleast_1d(x).astype(np.float64) for n, x in each.items()})
        self._pending = []
        series = {name: np.stack([e[name] for e in self._fetched]) for name in self._fetched[0]}
        _check_skipped(series, step, self._config)
        self.skipping = bool(series["skipped"][-1].any())
        return series


def _check_skipped(series: Mapping[str, np.ndarray], step: int, config: ConfigDict) -> None:
    """Check that no seed left out too many steps in a row.

    Args:
      series: the metrics [steps, seeds] of the steps up to this one.
      step: the last step.
      config: the run's config, with the limit `max_skipped`.
    """
    bad = np.argwhere(series["skipped"] >= config.max_skipped)
    if not len(bad):
        return
    at, seed = bad[0]
    count = int(series["skipped"][at, seed])
    first = step - len(series["skipped"]) + 1 + at - count + 1
    raise RunError(
        f"not finite at step {first} of seed {config.seed + seed}, nor at any of the "
        f"{count} steps from there (config.max_skipped), which were left out: loss "
        f"{series['loss'][at, seed]}, gradient norm {series['gradient_norm'][at, seed]}; "
        f"nothing of them was saved; try a smaller config.optimizer.learning_rate or a longer "
        f"config.optimizer.warmup"
    )


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _plain(x: np.ndarray) -> Any:
    """Return numbers for JSON, with None for a number that is not finite."""
    values = [float(v) if math.isfinite(v) else None for v in x]
    return values[0] if len(values) == 1 else values


def _differs(path: Path, text: str, first: int) -> str | None:
    """Return the reason why a log that is there forbids to go on, or None.

    Other differences are printed.

    Args:
      path: the path of the log.
      text: the rows that the checkpoint has; more may have come after.
      first: the step of the first checkpoint, if there is none; or else 0.
    """
    try:
        found = files.read(path, MOST)
    except FileNotFoundError:
        found = b""
    except OSError as error:
        return f"{path} must be a file of its own ({error}); remove it"
    if not first:
        if not found.startswith(text.encode()):
            print(f"{path.name} was damaged, and is written anew from the checkpoint", flush=True)
        return None
    rows = _rows(found)
    reached = max((row["step"] for row in rows), default=0)
    # The second save waits for the end of the first; steps left out put both off.
    if reached > 2 * first and not any(row.get("skipped") for row in rows):
        return (
            f"{path.parent} has no checkpoint, and its log reaches step {reached}; restore its "
            f"checkpoints, or choose a new --workdir"
        )
    if found:
        print(f"{path.parent} has no checkpoint yet: it starts anew at step 1", flush=True)
    return None


def _rows(found: bytes) -> list[Row]:
    """Return the rows of a log in any state that can be read."""
    rows = []
    for line in found.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows
