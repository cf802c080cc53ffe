"""The optimizer that a config describes."""

import optax
from jax.tree_util import keystr, tree_map_with_path
from ml_collections import ConfigDict


def make_optimizer(config: ConfigDict) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Return AdamW with clipped gradients, and the learning rate as a function of the step.

    The rate grows linearly, then falls as a cosine. An update is of the mean gradient of
    `accumulate` steps. A gradient that is not finite changes nothing; the state counts them.
    """
    o = config.optimizer
    updates = config.steps // o.accumulate
    warmup = min(round(o.warmup * updates), updates - 1)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, o.learning_rate, warmup, updates, o.final * o.learning_rate
    )
    adamw = optax.adamw(
        schedule, b1=o.b1, b2=o.b2, weight_decay=o.weight_decay,
        mask=lambda params: tree_map_with_path(lambda at, _: "['kernel']" in keystr(at), params),
    )  # fmt: skip
    chain = optax.chain(optax.clip_by_global_norm(o.clip_norm), adamw)
    if o.accumulate > 1:
        chain = optax.MultiSteps(chain, o.accumulate).gradient_transformation()
    # Optax would take such gradients after so many in a row; the log ends the run long before.
    return optax.apply_if_finite(chain, 2**31 - 1), lambda step: schedule(step // o.accumulate)
