"""The optimizer that a config describes."""

import jax
import optax
from ml_collections import ConfigDict

from experiments.tasks.task import Params


def make_optimizer(config: ConfigDict) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Return AdamW with clipped gradients, and its schedule: linear warm-up, then a cosine.

    A gradient that is not finite changes neither parameters nor moments; the state counts them.
    """
    o = config.optimizer
    warmup = min(round(o.warmup * config.steps), config.steps - 1)
    start = 0.0 if warmup else o.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(
        start, o.learning_rate, warmup, config.steps, o.final * o.learning_rate
    )

    def kernels(params: Params) -> Params:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: any(getattr(entry, "key", None) == "kernel" for entry in path), params
        )

    adamw = optax.adamw(schedule, b1=o.b1, b2=o.b2, weight_decay=o.weight_decay, mask=kernels)
    chain = optax.chain(optax.clip_by_global_norm(o.clip_norm), adamw)
    # Optax would take such gradients after so many in a row; the log ends the run long before.
    return optax.apply_if_finite(chain, max_consecutive_errors=2**31 - 1), schedule
