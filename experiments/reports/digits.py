"""The report on digits: accuracy, and a picture of the attention."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.common import plots
from experiments.reports import base
from experiments.tasks.task import Params

DRAWN = 4  # test images in the picture of the attention


class Report(base.Report):
    """The report on `experiments.tasks.digits.Digits`."""

    training = "training: images moved"
    objective = "training loss: of smoothed labels"

    def headline(self, metrics: Mapping[str, np.ndarray]) -> str:
        """Return the test accuracy, with the standard deviation over several seeds."""
        accuracy = metrics["accuracy"]
        spread = f" ± {self.score(accuracy.std(ddof=1))}" if accuracy.size > 1 else ""
        return f"test accuracy {self.score(accuracy.mean())}{spread}"

    def draw(self, params: Params, workdir: Path) -> None:
        """Draw `attention.png`: the weight of each patch of some test images, for each head."""
        test = self.task.test
        # One image of each of the first digits: more can be told from different shapes.
        first = [int(np.flatnonzero(test["label"] == digit)[0]) for digit in range(DRAWN)]
        images = test["image"][np.asarray(first)]

        @jax.jit
        def observe(params: Params, images: jax.Array) -> tuple[jax.Array, Any]:
            return self.task.apply(params, images, sow_weights=True, mutable=["intermediates"])

        logits, state = jax.device_get(observe(params, images))
        layers = state["intermediates"]["encoder"]
        # [images, layers, heads, queries, keys]
        weights = np.stack(
            [
                layers[f"layers_{i}"]["attention"]["attention_weights"][0]
                for i in range(len(layers))
            ],
            axis=1,
        )
        plots.attention(
            workdir / "attention.png", images, weights,
            titles=[
                f"{label} read as {guess}"
                for label, guess in zip(test["label"][first], logits.argmax(-1), strict=True)
            ],
        )  # fmt: skip
