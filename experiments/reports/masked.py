"""The report on masked bytes: bits, and the distances of attention."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.common import plots
from experiments.reports import base
from experiments.tasks.task import Params

DRAWN = 256  # tokens at most in the picture of the attention


class Report(base.Report):
    """The report on `experiments.tasks.masked.Masked`."""

    def headline(self, metrics: Mapping[str, np.ndarray]) -> str:
        """Return bits and accuracy of a hidden byte, means over the seeds."""
        bits, accuracy = metrics["loss"].mean() / np.log(2), 100 * metrics["accuracy"].mean()
        return f"test {bits:.2f} bits a hidden byte, {accuracy:.1f}% right"

    def draw(self, params: Params, workdir: Path) -> None:
        """Draw `attention.png`: the mean weight of each distance, on the first held-out bytes."""
        tokens = self.task.test[None, : min(DRAWN, self.task.config.length)].astype(np.int32)

        @jax.jit
        def observe(params: Params, tokens: jax.Array) -> Any:
            call: dict[str, Any] = {"sow_weights": True, "deterministic": True}
            call["mutable"] = ["intermediates"]
            return self.task.model.apply({"params": params}, tokens, **call)[1]

        sown = jax.tree.leaves(jax.device_get(observe(params, tokens)))
        T = tokens.shape[1]
        weights = np.concatenate([x.reshape(-1, x.shape[-3], T, T) for x in sown])
        plots.by_distance(workdir / "attention.png", weights)
