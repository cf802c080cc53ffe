"""The interface between the trainer and a task, and an endless shuffled stream for its data."""

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

import grain
import jax
import numpy as np
from grain.experimental import RebatchIterDataset

Params = Any
Batch = Mapping[str, Any]  # arrays whose first axis counts the rows
Metrics = dict[str, Any]  # numbers by name, each of shape [seeds] outside of a task
_FOREVER = 2**31  # epochs


class Task(Protocol):
    """Data, model, loss and metrics: everything that the trainer leaves to a task."""

    def init(self, key: jax.Array) -> Params:
        """Return fresh parameters. Traced."""

    def data(self) -> list[bytes]:
        """Return all that the run learns from and is tested on, for a hash of it."""

    def batches(self, seed: int, batch_size: int, rows: np.ndarray) -> grain.IterDataset:
        """Return endless training batches in the order of a seed: these rows of each batch."""

    def test_batches(self) -> list[Batch]:
        """Return the held-out data, with an array `weight` that is 0 where a row is padding."""

    def loss(self, params: Params, batch: Batch, key: jax.Array) -> tuple[jax.Array, Metrics]:
        """Return the loss to minimize and further metrics, means over the batch. Traced."""

    def evaluate(self, params: Params, batch: Batch) -> Metrics:
        """Return weighted sums over a test batch, and `count`, the sum of weights. Traced."""


def shuffled(size: int, batch_size: int, seed: int) -> grain.IterDataset:
    """Return endless batches of indices [batch_size], each epoch a new order of 0 … size − 1.

    A whole epoch is drawn at once: element by element, grain takes 30 µs for each index.
    """
    epochs = grain.MapDataset.range(_FOREVER).seed(seed)
    orders = epochs.random_map(lambda _, rng: rng.permutation(size))
    serial = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return RebatchIterDataset(orders.to_iter_dataset(serial), batch_size)


def fingerprint(task: Task) -> str:
    """Return the SHA-256 of a task's data."""
    return hashlib.sha256(b"\0".join(task.data())).hexdigest()
