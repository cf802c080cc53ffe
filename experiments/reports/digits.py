"""The report on digits: accuracy, two classic methods, and a picture of the attention."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.common import plots
from experiments.reports import base
from experiments.reports.base import measured
from experiments.tasks.task import Params

DRAWN = 4  # test images in the picture of the attention


class Report(base.Report):
    """The report on `experiments.tasks.digits.Digits`."""

    def __init__(self, task: Any) -> None:
        self.task = task
        config = task.config
        self.training = measured(config, "images moved" if any(config.augment.values()) else "")
        self.objective = "training loss: of smoothed labels" if config.label_smoothing else ""

    def headline(self, metrics: Mapping[str, np.ndarray]) -> str:
        """Return the test accuracy, with the standard deviation over several seeds."""
        accuracy = metrics["accuracy"]
        spread = f" ± {self.score(accuracy.std(ddof=1))}" if accuracy.size > 1 else ""
        return f"test accuracy {self.score(accuracy.mean())}{spread}"

    def baselines(self) -> dict[str, float]:
        """Return the scores of two classics on the raw pixels of the same split."""
        from sklearn.linear_model import LogisticRegression
        from sklearn.svm import SVC
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

        models: dict[str, Any] = {
            "logistic regression": LogisticRegression(max_iter=1000),
            "RBF SVM": SVC(kernel="rbf"),
        }
        (x, y), (test_x, test_y) = (
            (split["image"].reshape(len(split["image"]), -1), split["label"])
            for split in (self.task.train, self.task.test)
        )
        # Products this small take a hundred times longer when two threads wait for each other.
        with threadpool_limits(1):
            return {name: float(m.fit(x, y).score(test_x, test_y)) for name, m in models.items()}

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
