"""What the trainer asks of a task, and an endless shuffled stream for its data."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import grain
import jax
import numpy as np
from grain.experimental import RebatchIterDataset
from ml_collections import ConfigDict

from experiments.runs.failures import RunError

Params = Any
Batch = Mapping[str, Any]  # arrays whose first axis counts the rows

_FOREVER = 2**31  # epochs


class Task(Protocol):
    """Data, model, loss, metrics and pictures: all that the training loop does not know.

    Attributes:
      training: how the metrics of the training rows are measured, for pictures.
      objective: what `loss` is, if it is another quantity than the loss of `evaluate`; or else "".
    """

    training: str
    objective: str

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters. Traced."""

    def batches(self, seed: int, batch_size: int, rows: np.ndarray) -> grain.IterDataset:
        """Endless training batches, a pure function of the seed.

        Args:
          seed: of the order.
          batch_size: of the whole batch, over all processes.
          rows: indices of the rows of each batch that this process loads.
        """

    def test_batches(self) -> list[Batch]:
        """The held-out data, the same on every process.

        Each has an array `weight`, which is 0 where a row is padding.
        """

    def loss(
        self, params: Params, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss to minimize and further metrics, means over the batch. Traced."""

    def evaluate(self, params: Params, batch: Batch) -> dict[str, jax.Array]:
        """Sums over a test batch, weighted, and `count`, the sum of the weights. Traced."""

    def headline(self, metrics: Mapping[str, np.ndarray]) -> str:
        """The last line of a run, from test metrics of shape [seeds]."""

    def score(self, value: float) -> str:
        """How a score is written, such as 98.9%."""

    def fingerprint(self) -> str:
        """A hash of the data: a run, and what is made of it, are about those."""

    def baselines(self) -> dict[str, float]:
        """What others score on the same held-out data, by name."""

    def draw(self, params: Params, workdir: Path) -> None:
        """Leaves pictures of the trained model in the folder."""


@runtime_checkable
class Speaker(Protocol):
    """A task whose model makes text of text."""

    def respond(
        self, params: Params, prompt: str, say: Callable[[str], None], **options: Any
    ) -> None:
        """Says, piece by piece, what the model makes of a prompt.

        Args:
          params: of the trained model.
          prompt: a text.
          say: takes the pieces.
          **options: of `flax_mha.generate`; None for the task's own.

        Raises:
          RunError: if the prompt does not suit the model.
        """


def contents(path: str) -> bytes:
    """Return the bytes of the file that config.data.path names.

    Raises:
      RunError: if it can't be read, or is no file: of a device or a pipe there is no end.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise OSError("it is no regular file")
        return Path(path).read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"config.data.path must be a file, got {path:.300}: {reason}") from None


def measured(config: ConfigDict, *ways: str) -> str:
    """Return how the metrics of the training rows are measured: in some ways, and with dropout.

    Args:
      config: of the run, whose rates of dropout count.
      *ways: such as "images moved"; empty ones are left out.
    """
    rates = [rate for name, rate in config.model.items() if name.endswith("dropout_rate")]
    how = ", ".join(way for way in (*ways, "with dropout" if any(rates) else "") if way)
    return f"training: {how}" if how else "training"


def shuffled(size: int, batch_size: int, seed: int) -> grain.IterDataset:
    """Endless batches of indices int64 [batch_size]; each epoch is a new order of 0 … size − 1.

    A whole epoch is drawn at once: element by element, grain takes 30 µs for each index.
    """
    epochs = grain.MapDataset.range(_FOREVER).seed(seed)
    orders = epochs.random_map(lambda _, rng: rng.permutation(size))
    serial = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return RebatchIterDataset(orders.to_iter_dataset(serial), batch_size)
