from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import dates, masked, pydoc_lm
from experiments import reports, tasks
from experiments.tasks import digits
from experiments.tasks.task import shuffled


def as_set(images: np.ndarray) -> set[bytes]:
    return {image.tobytes() for image in images.astype(np.float32)}


@pytest.mark.sampled(0.13, slow=0.2)
def test_split_is_fixed_disjoint_and_stratified() -> None:
    from sklearn.datasets import load_digits  # Slow to import.

    train, test = digits.load()
    assert (len(train["label"]), len(test["label"])) == (1437, 360)
    assert not as_set(train["image"]) & as_set(test["image"])
    assert as_set(train["image"]) | as_set(test["image"]) == as_set(load_digits().images / 16)
    assert set(np.bincount(test["label"])) <= {35, 36, 37}
    # Recorded from the first run: scores on another split would not be comparable.
    assert test["label"][:12].tolist() == [7, 6, 3, 7, 7, 3, 2, 8, 9, 3, 2, 6]


def test_each_epoch_is_a_new_order_of_all_examples() -> None:
    indices = np.concatenate(list(islice(shuffled(30, 8, seed=0), 15)))[:90].reshape(3, 30)
    assert np.all(np.sort(indices) == np.arange(30))
    assert len({tuple(epoch) for epoch in indices}) == 3


def test_order_is_a_function_of_the_seed() -> None:
    one, same, other = (next(iter(shuffled(100, 10, seed))) for seed in (1, 1, 2))
    assert one.tolist() == same.tolist() != other.tolist()


def test_processes_split_each_batch(config: ConfigDict) -> None:
    """Together they see the examples of one process, in the same order."""
    task = digits.Digits(config)
    parts = np.arange(24), *np.arange(24).reshape(3, 8)
    streams = (islice(task.batches(0, 24, rows), 3) for rows in parts)
    for whole, *shards in zip(*streams, strict=True):
        for name, x in whole.items():
            np.testing.assert_array_equal(x, np.concatenate([shard[name] for shard in shards]))


def test_augmentation_by_zero_is_the_identity() -> None:
    images = jnp.asarray(digits.load()[1]["image"][:5])
    same = digits.augment(images, jax.random.key(0), shift=0.0, rotate=0.0, scale=0.0)
    np.testing.assert_allclose(same, images, atol=1e-6)


@pytest.mark.parametrize("shift", [0.5, 1.0])
def test_augmentation_moves_by_at_most_the_shift(shift: float) -> None:
    point = jnp.zeros((200, 8, 8)).at[:, 3, 4].set(1.0)
    moved = digits.augment(point, jax.random.key(1), shift=shift, rotate=0.0, scale=0.0)
    np.testing.assert_allclose(moved.sum((1, 2)), 1.0, atol=1e-5)
    y = (moved * jnp.arange(8.0)[None, :, None]).sum((1, 2)) - 3
    x = (moved * jnp.arange(8.0)[None, None]).sum((1, 2)) - 4
    for offset in (y, x):
        assert jnp.abs(offset).max() <= shift + 1e-5
        assert offset.min() < -0.8 * shift
        assert offset.max() > 0.8 * shift


def test_baselines_reach_their_known_accuracy(config: ConfigDict) -> None:
    scores = reports.make(digits.Digits(config)).baselines()
    assert 0.95 < scores["logistic regression"] < scores["RBF SVM"] < 1.0


@pytest.mark.parametrize(
    ("settings", "training", "objective"),
    [
        ({}, "training: images moved", True),
        ({"model.dropout_rate": 0.1}, "training: images moved, with dropout", True),
        ({"model.attention_dropout_rate": 0.1}, "training: images moved, with dropout", True),
        ({"augment.shift": 0.0, "augment.rotate": 0.0, "augment.scale": 0.0}, "training", True),
        ({"label_smoothing": 0.0}, "training: images moved", False),
    ],
)
def test_legend_names_the_training_measure(
    config: ConfigDict, settings: dict[str, float], training: str, objective: bool
) -> None:
    config.update_from_flattened_dict(settings)
    report = reports.make(digits.Digits(config))
    assert (report.training, bool(report.objective)) == (training, objective)


@pytest.mark.parametrize(
    ("task", "training"),
    [(masked, "training"), (pydoc_lm, "training: any context"), (dates, "training")],
)
def test_legend_names_dropout_only_if_used(task: Any, training: str) -> None:
    config = task.get_config()
    assert reports.make(tasks.make(config)).training == training
    config.model.dropout_rate = 0.1
    assert (
        reports.make(tasks.make(config)).training.removeprefix(training).strip(":, ")
        == "with dropout"
    )
