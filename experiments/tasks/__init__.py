"""What can be trained: a task is data, model, loss, metrics and pictures."""

from collections.abc import Callable

from ml_collections import ConfigDict

import configs.dates
import configs.digits
import configs.masked
import configs.pydoc_lm
from experiments.runs.failures import RunError
from experiments.tasks import digits, masked, text, translation
from experiments.tasks.task import Task

# By `config.task`. A new task is one file here and one in configs/.
TASKS: dict[str, Callable[[ConfigDict], Task]] = {
    "digits": digits.Digits,
    "masked": masked.Masked,
    "text": text.Text,
    "translation": translation.Translation,
}
# What the config of each has.
EXAMPLES: dict[str, Callable[[], ConfigDict]] = {
    "digits": configs.digits.get_config,
    "masked": configs.masked.get_config,
    "text": configs.pydoc_lm.get_config,
    "translation": configs.dates.get_config,
}


def make(config: ConfigDict) -> Task:
    """The task that `config.task` names.

    Raises:
      RunError: if there is none of that name.
    """
    if config.task not in TASKS:
        raise RunError(f"config.task must be one of {sorted(TASKS)}, got {config.task!r}")
    return TASKS[config.task](config)
