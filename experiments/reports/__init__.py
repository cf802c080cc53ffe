"""Reports on finished runs: pictures, and the score in words."""

from typing import Any

from experiments.reports import base, digits, masked, text, translation

# By `config.task`; a task that is not here has the plain report of `base`.
REPORTS: dict[str, type[base.Report]] = {
    "digits": digits.Report,
    "masked": masked.Report,
    "text": text.Report,
    "translation": translation.Report,
}


def make(task: Any) -> base.Report:
    """Return the report on a task."""
    return REPORTS.get(task.config.task, base.Report)(task)
