import functools
from itertools import islice

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from experiments.tasks import digits
from experiments.tasks.task import shuffled


def as_set(images: np.ndarray) -> set[bytes]:
    return {image.tobytes() for image in images.astype(np.float32)}


@pytest.mark.sampled(0.08)
def test_split_is_fixed_disjoint_and_stratified() -> None:
    from sklearn.datasets import load_digits  # Slow to import.

    train, test = digits.load()
    assert (len(train["label"]), len(test["label"])) == (1437, 360)
    assert not as_set(train["image"]) & as_set(test["image"])
    assert as_set(train["image"]) | as_set(test["image"]) == as_set(load_digits().images / 16)
    assert set(np.bincount(test["label"])) <= {35, 36, 37}
    # Recorded from the first run: scores on another split would not be comparable.
    assert test["label"][:12].tolist() == [7, 6, 3, 7, 7, 3, 2, 8, 9, 3, 2, 6]


def test_each_epoch_is_a_new_order_by_the_seed() -> None:
    indices = np.concatenate(list(islice(shuffled(30, 8, seed=0), 15)))[:90].reshape(3, 30)
    assert np.all(np.sort(indices) == np.arange(30))
    assert len({tuple(epoch) for epoch in indices}) == 3
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


def test_augmentation_moves_by_at_most_the_shift() -> None:
    images = np.zeros((200, 8, 8), np.float32)
    images[:, 3, 4] = 1
    augment = functools.partial(digits.augment, rotate=0.0, scale=0.0)
    moved, same = (
        np.asarray(jax.jit(functools.partial(augment, shift=shift))(images, jax.random.key(1)))
        for shift in (0.5, 0.0)
    )
    np.testing.assert_allclose(same, images, atol=1e-6)
    np.testing.assert_allclose(moved.sum((1, 2)), 1, atol=1e-5)
    for offset in (moved.sum(2) @ np.arange(8) - 3, moved.sum(1) @ np.arange(8) - 4):
        assert np.abs(offset).max() <= 0.5 + 1e-5
        assert offset.min() < -0.4
        assert offset.max() > 0.4
