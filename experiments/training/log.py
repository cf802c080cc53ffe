"""What a run says: metrics in files, progress on a terminal."""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging as absl_logging
from ml_collections import ConfigDict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboardX import SummaryWriter

from experiments import failures
from experiments.failures import RunError
from experiments.training.program import Metrics
from experiments.training.runs import METRICS

Row = dict[str, Any]


def hush() -> None:
    """Keeps Orbax from telling much, and from a traceback for what ends the run with one line."""
    absl_logging.set_verbosity(absl_logging.WARNING)
    logging.getLogger("absl").addFilter(failures.said_later)


class Log:
    """Metrics of a run as JSON lines and TensorBoard events, written by process 0.

    Args:
      path: the run's folder.
      step: the step that the run starts from; rows beyond it, left by a run that was cut off,
        are dropped.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._file = path / METRICS
        self._writes = jax.process_index() == 0
        self.rows: list[Row] = []
        # Others might read what process 0 is writing.
        if self._writes and self._file.exists():
            rows = [json.loads(line) for line in self._file.read_text().splitlines()]
            self.rows = [row for row in rows if row["step"] <= step]
        self._events: SummaryWriter | None = None
        if self._writes:
            self._file.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
            self._events = SummaryWriter(str(path / "tensorboard"), purge_step=step + 1)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        if self._events is not None:
            self._events.close()

    def write(self, step: int, split: str, metrics: Mapping[str, np.ndarray]) -> None:
        """Adds a row; values have shape [seeds], and a single seed's is written as a number."""
        values = {name: float(x[0]) if x.size == 1 else x.tolist() for name, x in metrics.items()}
        row = {"step": step, "split": split, **values}
        self.rows.append(row)
        if self._events is None:
            return
        with self._file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        for name, x in metrics.items():
            self._events.add_scalar(f"{split}/{name}", float(x.mean()), step)
            for i, value in enumerate(x if x.size > 1 else ()):
                self._events.add_scalar(f"{split}/{name}/{i}", float(value), step)


@contextlib.contextmanager
def progress(steps: int, start: int) -> Iterator[Callable[[int, str, str], None]]:
    """A live bar on a terminal; elsewhere, a line for each evaluation.

    Yields:
      A function of the step, of a short text for the bar, and of a line (or "").
    """
    if jax.process_index() > 0:
        yield lambda step, short, line: None
    elif not sys.stderr.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        yield lambda step, short, line: print(line, flush=True) if line else None
    else:
        columns = (
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )  # fmt: skip
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=steps, completed=start)
            yield lambda step, short, line: bar.update(task, completed=step, description=short)


def means(pending: list[Metrics], step: int, config: ConfigDict) -> Metrics:
    """Means [seeds] over the steps up to this one, which must all be finite."""
    fetched = jax.device_get(pending)
    series = jax.tree.map(lambda *x: np.stack(x).reshape(len(x), -1), *fetched)  # [steps, seeds]
    bad = np.argwhere(~np.isfinite(series["loss"] + series["gradient_norm"]))
    if len(bad):
        at, seed = bad[0]
        raise RunError(
            f"not finite at step {step - len(pending) + 1 + at} of seed {config.seed + seed}: "
            f"loss {series['loss'][at, seed]}, gradient norm {series['gradient_norm'][at, seed]}; "
            f"nothing after it was saved; try a smaller config.optimizer.learning_rate or a "
            f"longer config.optimizer.warmup"
        )
    return {name: x.mean(0) for name, x in series.items()}
