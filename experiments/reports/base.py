"""The report on a trained task: its score in words, and pictures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.tasks.task import Params


class Report:
    """A report on any task, to be refined for a known one.

    Args:
      task: the task, with its `config`.

    Attributes:
      training: a legend that tells how the metrics of training rows are measured.
      objective: the name of the training loss, if the test loss is another quantity; or else "".
    """

    training, objective = "training", ""

    def __init__(self, task: Any) -> None:
        self.task = task

    def headline(self, metrics: Mapping[str, np.ndarray]) -> str:
        """Return the last line of a run, from test metrics of shape [seeds]."""
        return "test " + ", ".join(f"{name} {x.mean():.4f}" for name, x in metrics.items())

    def score(self, value: float) -> str:
        """Return a score as text, such as 98.9%."""
        return f"{value:.1%}"

    def draw(self, params: Params, workdir: Path) -> None:
        """Leave pictures of the trained model in the folder."""
