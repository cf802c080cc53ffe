"""The report on a trained task: its score in words, other scores on its data, and pictures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from experiments.tasks.task import Params


class Report:
    """A report on any task, to be refined for a known one.

    Args:
      task: the task, with its `config`.

    Attributes:
      training: a legend that tells how the metrics of training rows are measured.
      objective: the name of the training loss, if the test loss is another quantity; or else "".
    """

    def __init__(self, task: Any) -> None:
        self.task = task
        self.training, self.objective = measured(task.config), ""

    def headline(self, metrics: Mapping[str, np.ndarray]) -> str:
        """Return the last line of a run, from test metrics of shape [seeds]."""
        return "test " + ", ".join(f"{name} {x.mean():.4f}" for name, x in metrics.items())

    def score(self, value: float) -> str:
        """Return a score as text, such as 98.9%."""
        return f"{value:.1%}"

    def baselines(self) -> dict[str, float]:
        """Return the scores of other methods on the same held-out data, by name."""
        return {}

    def draw(self, params: Params, workdir: Path) -> None:
        """Leave pictures of the trained model in the folder."""


def measured(config: ConfigDict, *ways: str) -> str:
    """Return how the metrics of the training rows are measured: in some ways, and with dropout.

    Args:
      config: the run's config, whose rates of dropout count.
      *ways: words such as "images moved"; empty ones are left out.
    """
    rates = [rate for name, rate in config.model.items() if name.endswith("dropout_rate")]
    how = ", ".join(way for way in (*ways, "with dropout" if any(rates) else "") if way)
    return f"training: {how}" if how else "training"
