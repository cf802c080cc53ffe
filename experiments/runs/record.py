"""The record beside a checkpoint's arrays: their checksums, the place in the data, and the log.

A record is JSON with a digest of itself. A checkpoint whose record or arrays have changed since it
was saved is damaged: it is set aside, and never taken.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments import phases
from experiments.runs import files, hosts
from experiments.runs.failures import RunError
from experiments.runs.integrity import checksums, descriptions, digest

FOLDER, DAMAGED = "checkpoints", "checkpoints.damaged"
_LOG = 2**28  # bytes of a log that is read

# The form of a record, for `_has_form`. A record is used only if it has this form: a digest proves
# that nothing was changed by accident, not who wrote it.
_METRIC = (int, float, type(None), [(int, float, type(None))])
_SERIES = [(int, float)]
_RECORD = {
    "step": int,
    "arrays": {str: str},
    "log": {
        "rows": [{"step": int, "split": str, "loss": _METRIC, str: _METRIC}],
        "pending": [{"loss": _SERIES, "gradient_norm": _SERIES, "skipped": _SERIES, str: _SERIES}],
    },
}  # fmt: skip


class Saved(NamedTuple):
    """The content of a checkpoint."""

    step: int
    state: Any
    log: Mapping[str, Any]  # see `Log.saved`


class DamagedError(RunError):
    """A checkpoint that is not whole."""


def seal(step: int, state: Any, data: Any, log: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a checkpoint, with the checksums of its arrays and its own digest.

    Args:
      step: the step that was just trained.
      state: the arrays.
      data: the state of the data's iterator, the same on all processes.
      log: the log, see `Log.saved`.
    """
    sums = checksums(state)
    if bad := [name for name in sums.not_finite if name.startswith("params/")]:
        raise RunError(
            f"{bad[0]} is not finite at step {step}: it was not saved; try a "
            f"smaller config.optimizer.learning_rate or a longer config.optimizer.warmup"
        )
    record = {"step": step, "data": data, "log": log, "arrays": sums.arrays}
    return record | {"digest": digest(record)}


def check(record: Any, step: int, data: Any) -> dict[str, Any]:
    """Return a record without its digest, if it has not changed since it was saved at a step.

    Args:
      record: the value read from the checkpoint.
      step: the step of the checkpoint.
      data: a state of the data's iterator, whose form the record's must have.

    Raises:
      DamagedError: if it is anything else.
    """
    if not isinstance(record, dict) or record.pop("digest", None) != digest(record):
        raise DamagedError("its record does not match its digest")
    if not _has_form(record, _RECORD | {"data": jax.tree.map(type, data)}):
        raise DamagedError("its record lacks a part, or has one of another form")
    if len({str({k: len(x) for k, x in each.items()}) for each in record["log"]["pending"]}) > 1:
        raise DamagedError("the steps of its log have different metrics")
    if record["step"] != step:
        raise DamagedError(f"it is that of step {record['step']}")
    return record


def check_model(record: Mapping[str, Any], abstract: Any) -> None:
    """Check that a record's arrays have the names, dtypes and shapes of this program's state."""
    here = descriptions(abstract)
    there = {name: text.partition(" ")[2] for name, text in record["arrays"].items()}
    if here != there:
        name = sorted(n for n in here | there if here.get(n) != there.get(n))[0]
        raise RunError(
            f"the checkpoint of step {record['step']} is of another model: {name} is "
            f"{there.get(name, 'missing')} there and {here.get(name, 'missing')} here; go on "
            f"with the versions of this program and its packages that it was begun with"
        )


def check_arrays(record: Mapping[str, Any], state: Any) -> None:
    """Check that restored arrays have the checksums of the record.

    Raises:
      DamagedError: if one has not.
    """
    found = checksums(state).arrays
    if wrong := [name for name, text in record["arrays"].items() if found[name] != text]:
        raise DamagedError(f"{len(wrong)} of its {len(found)} arrays differ, such as {wrong[0]}")


@contextlib.contextmanager
def reading(step: int | None = None) -> Iterator[None]:
    """Turn any error of Orbax and TensorStore inside into a DamagedError.

    Args:
      step: the step whose arrays are read by all processes, each its part. Several processes then
        end together: the others would wait for this one.
    """
    try:
        yield
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        if step is not None and jax.process_count() > 1:
            hosts.end(
                f"the checkpoint of step {step} is damaged: {reason}; all processes end; start "
                f"the command once on one process, which sets it aside"
            )
        raise DamagedError(reason) from error


def report(step: int, error: DamagedError) -> int:
    """Print that a checkpoint is damaged, and return its step."""
    phases.say(f"the checkpoint of step {step} is damaged: {error}")
    return step


def set_aside(folder: Path, steps: Sequence[int]) -> None:
    """Move damaged checkpoints out of the way of new ones."""
    if jax.process_index() == 0:
        (folder / DAMAGED).mkdir(exist_ok=True)
        for step in steps:
            place, again = folder / DAMAGED / str(step), 2
            while place.exists():
                place, again = place.with_name(f"{step}-{again}"), again + 1
            os.rename(folder / FOLDER / str(step), place)
            phases.say(f"it was moved to {place}")
    hosts.all_begin(None)


def check_none(folder: Path, damaged: Sequence[int]) -> None:
    """Check that a run without a whole checkpoint never had one."""
    aside = folder / DAMAGED
    if damaged or (aside.is_dir() and any(aside.iterdir())):
        raise RunError(
            f"{folder} has no checkpoint that is whole; restore one of a copy of yours "
            f"to {folder / FOLDER}, or choose a new --workdir"
        )


def check_log(path: Path, text: str, first: int) -> None:
    """Check that a log that is there allows the run to start; print other differences.

    Args:
      path: the path of the log.
      text: the rows that the checkpoint has; more may have come after.
      first: the step of the first checkpoint, if there is none; or else 0.
    """
    try:
        found = files.read(path, _LOG)
    except FileNotFoundError:
        found = b""
    except OSError as error:
        raise RunError(f"{path} must be a file of its own ({error}); remove it") from None
    if not first:
        if not found.startswith(text.encode()):
            phases.say(f"{path.name} was damaged, and is written anew from the checkpoint")
        return
    rows: list[Any] = []
    for line in found.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    rows = [row for row in rows if isinstance(row, dict) and isinstance(row.get("step"), int)]
    reached = max((row["step"] for row in rows), default=0)
    # The second save waits for the end of the first; steps left out put both off.
    if reached > 2 * first and not any(row.get("skipped") for row in rows):
        raise RunError(
            f"{path.parent} has no checkpoint, and its log reaches step {reached}; restore its "
            f"checkpoints, or choose a new --workdir"
        )
    if found:
        phases.say(f"{path.parent} has no checkpoint yet: it starts anew at step 1")


class Best:
    """A preservation policy of Orbax that keeps the checkpoints of the lowest test loss.

    Orbax's own `BestN` needs a file of metrics in each checkpoint, which has no checksum; the log
    has the losses of all.
    """

    def __init__(self, count: int) -> None:
        self._count, self._losses = count, dict[int, float]()

    def read(self, log: Mapping[str, Any]) -> None:
        """Take the test losses from the rows of a log."""
        rows = [row for row in log["rows"] if row["split"] == "test"]
        self._losses = {row["step"]: _mean(row["loss"]) for row in rows}

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return True for each checkpoint to keep."""
        del context
        steps = [info.step for info in checkpoints]
        tested = sorted((self._losses[step], step) for step in steps if step in self._losses)
        kept = {step for _, step in tested[: self._count]}
        return [step in kept for step in steps]


def _mean(loss: Any) -> float:
    """Return the mean over seeds, or infinity if one is not finite."""
    values = loss if isinstance(loss, list) else [loss]
    return float("inf") if None in values else sum(values) / len(values)


def _has_form(value: Any, form: Any) -> bool:
    """Return True if a value read from JSON has a form.

    Args:
      value: the value.
      form: a type; a tuple of alternatives; a list with the form of every element; or a dict with
        the forms of keys that must be there, and at `str` the form of all other keys.
    """
    if isinstance(form, tuple):
        return any(_has_form(value, each) for each in form)
    if isinstance(form, list):
        return isinstance(value, list) and all(_has_form(each, form[0]) for each in value)
    if isinstance(form, dict):
        return (
            isinstance(value, dict)
            and form.keys() - {str} <= value.keys()
            and all(_has_form(x, form.get(key, form.get(str, ()))) for key, x in value.items())
        )
    return isinstance(value, form)
