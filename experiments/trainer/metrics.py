"""The metrics of a run: means over training steps, and over the test data."""

from collections.abc import Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments.common.failures import RunError
from experiments.tasks.task import Batch, Metrics, Params
from experiments.trainer.mesh import Program


def check_skipped(config: ConfigDict, series: Metrics, step: int) -> None:
    """Check that no seed left out too many steps in a row, up to this one.

    Args:
      config: the run's config.
      series: the metrics [steps, seeds].
      step: the last step.
    """
    bad = np.argwhere(series["skipped"] >= config.max_skipped)
    if len(bad):
        at, seed = bad[0]
        count = int(series["skipped"][at, seed])
        first = step - len(series["skipped"]) + 1 + at - count + 1
        raise RunError(
            f"not finite at step {first} of seed {config.seed + seed}, nor at any of the {count} "
            f"steps from there (config.max_skipped), which were left out: loss "
            f"{series['loss'][at, seed]}, gradient norm {series['gradient_norm'][at, seed]}; "
            f"nothing of them was saved; try a smaller config.optimizer.learning_rate or a longer "
            f"config.optimizer.warmup"
        )


def means(series: Metrics) -> Metrics:
    """Return the means [seeds] of metrics [steps, seeds], and how many steps were left out."""
    taken = series["skipped"] == 0
    with np.errstate(invalid="ignore"):  # The mean over no step is NaN.
        found = {name: np.where(taken, x, 0).sum(0) / taken.sum(0) for name, x in series.items()}
    return found | {"skipped": (~taken).sum(0).astype(np.float64)}


def evaluate(program: Program, params: Params, batches: Sequence[Batch]) -> Metrics:
    """Return the test metrics [seeds]: means over all rows that are not padding."""
    each = jax.device_get([program.evaluate(params, batch) for batch in batches])
    total = jax.tree.map(lambda *x: np.atleast_1d(np.sum(x, axis=0)), *each)
    count = total.pop("count")
    return {name: x / count for name, x in total.items()}
