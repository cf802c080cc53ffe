"""The tasks that can be trained: data, model, loss and metrics of each."""

from collections.abc import Callable

from ml_collections import ConfigDict

from experiments.tasks import digits, masked, text, translation
from experiments.tasks.task import Task

# By `config.task`. A new task is a file here, and one in configs/.
TASKS: dict[str, Callable[[ConfigDict], Task]] = {
    "digits": digits.Digits,
    "masked": masked.Masked,
    "text": text.Text,
    "translation": translation.Translation,
}


def make(config: ConfigDict) -> Task:
    """Return the task that `config.task` names."""
    return TASKS[config.task](config)
