"""The report on text: bits per byte, two compressors, an n-gram model, and the use of context."""

import gzip
import lzma
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.common import plots
from experiments.reports import base
from experiments.reports.base import measured
from experiments.tasks.task import Params
from experiments.tasks.text import START, windows

BYTES = 256


def witten_bell(train: bytes, test: bytes, order: int = 6) -> float:
    """Return the bits per byte of an n-gram model, each order interpolated with the next lower one.

        P(w | h) = (c(h w) + u(h) · P(w | h′)) / (c(h) + u(h))

    with counts c in the training text, u(h) different bytes after h, and h′ the history h without
    its first byte; below the last, every byte is equally likely.

    Args:
      train: the training text.
      test: the text to predict.
      order: the number of bytes that a count is about, at most.

    Source: Witten and Bell, "The Zero-Frequency Problem", 1991 (method C, interpolated).
    """
    follow: defaultdict[bytes, Counter[int]] = defaultdict(Counter)
    train, n = START + train, len(test)
    for i in range(1, len(train)):
        for h in range(min(order, i + 1)):
            follow[train[i - h : i]][train[i]] += 1
    totals = {history: counts.total() for history, counts in follow.items()}
    text, bits = START + test, 0.0
    for i in range(1, n + 1):
        p = 1 / BYTES
        for h in range(min(order, i + 1)):
            history = text[i - h : i]
            if history not in totals:
                break
            counts = follow[history]
            p = (counts[text[i]] + len(counts) * p) / (totals[history] + len(counts))
        bits -= math.log2(p)
    return bits / n


class Report(base.Report):
    """The report on `experiments.tasks.text.Text`."""

    def __init__(self, task: Any) -> None:
        self.task, self.objective = task, ""
        self.training = measured(task.config, "any context")

    def headline(self, metrics: Mapping[str, np.ndarray]) -> str:
        """Return the bits per byte of the held-out text."""
        bits = metrics["bits_per_byte"]
        spread = f" ± {bits.std(ddof=1):.3f}" if bits.size > 1 else ""
        return f"held-out text: {self.score(bits.mean())}{spread}"

    def score(self, value: float) -> str:
        """Return bits per byte as text."""
        return f"{value:.3f} bits per byte"

    def baselines(self) -> dict[str, float]:
        """Return the scores of two compressors of the held-out text, and of an n-gram model."""
        test = self.task.test
        return {
            "gzip": 8 * len(gzip.compress(test, 9)) / len(test),
            "xz": 8 * len(lzma.compress(test, preset=9)) / len(test),
            "Witten-Bell 6-gram": witten_bell(self.task.train, test),
        }

    def draw(self, params: Params, workdir: Path) -> None:
        """Draw `context.png`: bits per byte over the number of tokens seen before it."""
        T = self.task.config.length
        apart = windows(self.task.held, T, T)
        losses = np.asarray(jax.jit(self.task.losses)(params, apart))
        weight = apart["weight"]
        bits = (losses * weight).sum(0) / np.maximum(weight.sum(0), 1) * self.task.scales[1]
        plots.by_place(workdir / "context.png", np.where(weight.any(0), bits, np.nan))
