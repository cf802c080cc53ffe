"""Heads needed: how many can a trained model lose, and in which order?

    python -m experiments.studies.heads_needed --figure=docs/_static/studies/heads_needed.png

A classifier of digits and a translator of dates lose one head after another, the least important
one first or in random order. docs/studies/heads_needed.md has the answer. Source: Michel et al.,
arXiv 1905.10650.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from configs import dates, digits
from experiments.studies import base, heads
from experiments.studies.figures import COLORS, draw_band, make_panels, save, spread
from experiments.tasks import make
from experiments.tasks.task import Batch
from experiments.trainer.optimizer import make_optimizer
from flax_mha import edits

CONFIGS, SHAPES = {"digits": digits, "dates": dates}, {"digits": (2, 8), "dates": (6, 4)}
BATCH, PAIRS, WEIGHED, TESTED = 64, 30_000, 512, 300  # rows: also to weigh heads by, and to test


def load(name: str, steps: int) -> tuple[Any, Any, Batch, Batch]:
    """Return a config, its task, and data to learn from and to test."""
    config = CONFIGS[name].get_config()
    config.steps, config.model.activation = steps, "relu"
    task: Any = make(config)
    if name == "digits":
        return config, task, task.train, {key: x[:TESTED] for key, x in task.test.items()}
    pairs = task.split.train
    rows = np.random.default_rng(0).choice(len(pairs), PAIRS, replace=False)
    train = task.arrays([pairs[int(row)] for row in rows])
    return config, task, train, task.arrays(task.split.test[:TESTED])


def evaluate(model: Any, params: Any, keep: jax.Array, batch: Batch) -> tuple[Any, Any]:
    """Return the losses of rows, and 1 where greedy decoding gives the label, with heads × keep."""
    variables = heads.replace(params, "attention_z", keep[..., None, :, None], 0.0)
    if "image" in batch:
        images, labels = batch["image"][..., None], batch["label"][:, None]
        logits = model.apply(variables, images, deterministic=True)[:, None]
    else:  # Greedy decoding does if each character is the likeliest after the true ones before it.
        labels, call = batch["target"], {"source_lengths": batch["length"], "deterministic": True}
        begun = jnp.pad(labels[:, :-1], [(0, 0), (1, 0)])  # START is 0.
        logits = model.apply(variables, batch["source"], begun, **call)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(-1), (logits.argmax(-1) == labels).all(-1).astype(jnp.float32)


def weigh_heads(model: Any, params: Any, batch: Batch, shape: tuple[int, int]) -> np.ndarray:
    """Return the importance of each head [layers, N]: the mean over rows of |∂loss / ∂keep|.

    The values of a layer are divided by their norm, as in the source.
    """
    ones = jnp.ones((shape[0], len(jax.tree.leaves(batch)[0]), shape[1]))
    slopes = jax.grad(lambda keep, p: evaluate(model, p, keep, batch)[0].sum())
    found = np.abs(jax.jit(slopes)(ones, params)).mean(1)
    return found / np.linalg.norm(found, axis=-1, keepdims=True)


def study(name: str, steps: int, seeds: int) -> np.ndarray:
    """Return accuracies [points, order, seeds], by importance and by chance, of fewer heads."""
    config, task, data, test = load(name, steps)
    data, rng, shape = jax.tree.map(jnp.asarray, data), np.random.default_rng(0), SHAPES[name]

    def draw(key: jax.Array) -> Batch:
        rows = jax.random.randint(key, (BATCH,), 0, len(jax.tree.leaves(data)[0]))
        return {name: x[rows] for name, x in data.items()}

    def score(keep: jax.Array, params: Any) -> jax.Array:
        return evaluate(task.model, params, keep, test)[1].mean()

    made = base.make_steps(task.init, lambda *args: task.loss(*args)[0], make_optimizer(config)[0])
    trained, curves = base.train(*made, draw, steps, seeds, points=10).params, list[Any]()
    for seed in range(seeds):
        params = jax.tree.map(lambda x, seed=seed: x[seed], trained)
        rows = {key: x[:WEIGHED] for key, x in data.items()}
        orders = weigh_heads(task.model, params, rows, shape), rng.random(shape)
        curves.append([edits.sweep(score, heads.make_masks(order), params) for order in orders])
    return np.transpose(np.asarray(curves), (2, 1, 0))


def main() -> None:
    """Train, remove heads, draw the accuracies and print them."""
    flags = base.read_flags(__doc__, steps=600, seeds=5)
    figure, panels = make_panels({
        "Digits: 2 layers of 8 heads": ("attention heads left", "test accuracy"),
        "Dates: 6 layers of 4 heads": ("attention heads left", "exact match of held-out dates"),
    })  # fmt: skip
    for (name, (layers, count)), axes in zip(SHAPES.items(), panels, strict=True):
        left, curves = (
            np.arange(layers * count, layers - 1, -1),
            study(name, flags.steps, flags.seeds),
        )
        for i, order in enumerate(("least important first", "random order")):
            draw_band(axes, left, curves[:, i], order, COLORS[i])
        axes.set(xlim=(left[0], left[-1]), ylim=(0, 1.02), xticks=left[::2])
        for number, scores in list(zip(left, curves, strict=True))[::2]:
            print(f"{name}, {number} left by importance, chance: {[*map(spread, scores)]}")
    save(figure, flags.figure)


if __name__ == "__main__":
    main()
