"""The report on text: bits per byte, and the use of context."""

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from experiments.common import plots
from experiments.reports import base
from experiments.tasks.task import Params
from experiments.tasks.text import windows


class Report(base.Report):
    """The report on `experiments.tasks.text.Text`."""

    training = "training: any context"

    def headline(self, metrics: Mapping[str, np.ndarray]) -> str:
        """Return the bits per byte of the held-out text."""
        bits = metrics["bits_per_byte"]
        spread = f" ± {bits.std(ddof=1):.3f}" if bits.size > 1 else ""
        return f"held-out text: {self.score(bits.mean())}{spread}"

    def score(self, value: float) -> str:
        """Return bits per byte as text."""
        return f"{value:.3f} bits per byte"

    def draw(self, params: Params, workdir: Path) -> None:
        """Draw `context.png`: bits per byte over the number of tokens seen before it."""
        T = self.task.config.length
        apart = windows(self.task.held, T, T)
        losses = np.asarray(jax.jit(self.task.losses)(params, apart))
        weight = apart["weight"]
        bits = (losses * weight).sum(0) / np.maximum(weight.sum(0), 1) * self.task.scales[1]
        plots.by_place(workdir / "context.png", np.where(weight.any(0), bits, np.nan))
