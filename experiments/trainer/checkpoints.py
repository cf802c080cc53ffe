"""The states of a run on disk, by Orbax, each with checksums: a damaged one is never taken.

A step has two items: `state`, the arrays, and `run`, JSON: where the data were, the log, the sums
of the arrays (see `integrity`) and a digest of itself.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from experiments.runs import hosts
from experiments.runs.failures import RunError
from experiments.runs.integrity import checksums, descriptions, digest
from experiments.trainer.mesh import Program

FOLDER, DAMAGED = "checkpoints", "checkpoints.damaged"

# The record of a checkpoint, as `_matches` reads it. What it says is used only if it has this form:
# a digest proves that nothing was changed by accident, not who wrote it.
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


class _DamagedError(ValueError):
    """A checkpoint that is not whole."""


class Checkpoints:
    """The last checkpoints of a run, and the best; a context, at whose end all are written.

    Args:
      workdir: the run's folder.
      keep_last: how many of the latest are kept.
      keep_best: how many of the least test loss, beside them.
      read_only: changes nothing in the folder.
    """

    def __init__(
        self, workdir: Path, keep_last: int = 2, keep_best: int = 0, read_only: bool = False
    ) -> None:
        self._folder, self._read_only = workdir.absolute(), read_only
        self._keep = _Keep(keep_last, keep_best)
        self._open()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def restore(self, program: Program, data: Any) -> Saved | None:
        """The latest that is whole; the data iterator is moved to where it was then.

        Those after it that are damaged are set aside.

        Returns:
          None if the run has none yet.

        Raises:
          RunError: if all are damaged, or of another model.
        """
        damaged: list[int] = []
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                found = self._read(step, program, data)
            except _DamagedError as error:
                _say(f"the checkpoint of step {step} is damaged: {error}")
                damaged.append(step)
                continue
            self._set_aside(damaged)
            self._keep.rows = found.log["rows"]
            return found
        aside = self._folder / DAMAGED
        if damaged or (aside.is_dir() and any(aside.iterdir())):
            raise RunError(
                f"{self._folder} has no checkpoint that is whole; restore one of a copy of yours "
                f"to {self._folder / FOLDER}, or choose a new --workdir"
            )
        return None

    def save(self, step: int, state: Any, data: Any, log: Mapping[str, Any]) -> None:
        """Begins to write; the next save waits for its end.

        Raises:
          RunError: if a parameter is not finite; nothing is written then.
        """
        sums = checksums(state)
        if bad := [name for name in sums.not_finite if name.startswith("params/")]:
            raise RunError(
                f"{bad[0]} is not finite at step {step}: it was not saved; try a "
                f"smaller config.optimizer.learning_rate or a longer config.optimizer.warmup"
            )
        # The order of the data is the same on all processes: one file serves any number of them.
        run = {"step": step, "data": data.get_state(), "log": log, "arrays": sums.arrays}
        self._keep.rows = log["rows"]
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                run=ocp.args.JsonSave(run | {"digest": digest(run)}),
            ),
        )

    def wait(self) -> None:
        """Waits until all is written."""
        self._manager.wait_until_finished()

    def _open(self) -> None:
        # Orbax's own metrics would be files more to be damaged.
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._keep, create=not self._read_only,
            cleanup_tmp_directories=not self._read_only,
        )  # fmt: skip
        self._manager = ocp.CheckpointManager(
            self._folder / FOLDER, options=options, item_names=("state", "run"),
            item_handlers={
                "state": ocp.StandardCheckpointHandler(), "run": ocp.JsonCheckpointHandler(),
            },
        )  # fmt: skip

    def _read(self, step: int, program: Program, data: Any) -> Saved:
        """One checkpoint, if its sums are those that were taken when it was saved."""
        run = self._restore(step, run=ocp.args.JsonRestore())["run"]
        if not isinstance(run, dict) or run.pop("digest", None) != digest(run):
            raise _DamagedError("its record does not match its digest")
        if not _matches(run, _RECORD | {"data": jax.tree.map(type, data.get_state())}):
            raise _DamagedError("its record lacks a part, or has one of another form")
        if len({str({k: len(x) for k, x in each.items()}) for each in run["log"]["pending"]}) > 1:
            raise _DamagedError("the steps of its log have different metrics")
        if run["step"] != step:
            raise _DamagedError(f"it is that of step {run['step']}")
        abstract = program.abstract_state()
        ours = descriptions(abstract)
        theirs = {name: text.partition(" ")[2] for name, text in run["arrays"].items()}
        if ours != theirs:
            name = sorted(n for n in ours | theirs if ours.get(n) != theirs.get(n))[0]
            raise RunError(
                f"the checkpoint of step {step} is of another model: {name} is "
                f"{theirs.get(name, 'missing')} there and {ours.get(name, 'missing')} here; go on "
                f"with the versions of this program and its packages that it was begun with"
            )
        try:
            state = self._restore(step, state=ocp.args.StandardRestore(abstract))["state"]
        except _DamagedError as error:
            if jax.process_count() > 1:
                # Others may have read their parts, and would wait for this one.
                hosts.end(
                    f"the checkpoint of step {step} is damaged: {error}; all processes end; start "
                    f"the command once on one process, which sets it aside"
                )
            raise
        found = checksums(state).arrays
        if wrong := [name for name, text in run["arrays"].items() if found[name] != text]:
            raise _DamagedError(
                f"{len(wrong)} of its {len(found)} arrays differ, such as {wrong[0]}"
            )
        data.set_state(run["data"])
        return Saved(step, state, run["log"])

    def _restore(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # Whatever Orbax and TensorStore make of what they read.
            text = str(error).strip().splitlines() or [type(error).__name__]
            raise _DamagedError(text[0][:200]) from error

    def _set_aside(self, steps: Sequence[int]) -> None:
        """Moves damaged ones out of the way of those that will be written."""
        if not steps or self._read_only:
            return
        self._manager.close()
        if jax.process_index() == 0:
            (self._folder / DAMAGED).mkdir(exist_ok=True)
            for step in steps:
                place, again = self._folder / DAMAGED / str(step), 2
                while place.exists():
                    place, again = place.with_name(f"{step}-{again}"), again + 1
                os.rename(self._folder / FOLDER / str(step), place)
                _say(f"it was moved to {place}")
        hosts.all_begin(None)
        self._open()


def _matches(value: Any, form: Any) -> bool:
    """Return True if a value read from JSON has a form.

    Args:
      value: the value.
      form: a type; a tuple of alternatives; a list with the form of every element; or a dict with
        the forms of keys that must be there, and at `str` the form of all other keys.
    """
    if isinstance(form, tuple):
        return any(_matches(value, each) for each in form)
    if isinstance(form, list):
        return isinstance(value, list) and all(_matches(each, form[0]) for each in value)
    if isinstance(form, dict):
        return (
            isinstance(value, dict)
            and form.keys() - {str} <= value.keys()
            and all(_matches(x, form.get(key, form.get(str, ()))) for key, x in value.items())
        )
    return isinstance(value, form)


class _Keep:
    """Which checkpoints Orbax keeps: one of its preservation policies."""

    def __init__(self, last: int, best: int) -> None:
        self.last, self.best = last, best
        self.rows: Sequence[Mapping[str, Any]] = ()

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """For each, in the order of their steps."""
        del context
        steps = [info.step for info in checkpoints]
        losses = {row["step"]: _mean(row["loss"]) for row in self.rows if row["split"] == "test"}
        tested = sorted((losses[step], step) for step in steps if step in losses)
        kept = {*steps[-self.last :], *(step for _, step in tested[: self.best])}
        return [step in kept for step in steps]


def _mean(loss: Any) -> float:
    """Return the mean over seeds; a loss that is not finite counts as infinite."""
    values = loss if isinstance(loss, list) else [loss]
    return float("inf") if None in values else sum(values) / len(values)


def _say(line: str) -> None:
    if jax.process_index() == 0:
        print(line, flush=True)


def load(program: Program, workdir: Path) -> Any:
    """The latest state that a run has saved, on the devices of the program.

    Raises:
      RunError: if there is none.
    """
    none = RunError(f"{workdir} has no checkpoint yet; train it first")
    if not (workdir / FOLDER).is_dir():
        raise none
    with program.on_mesh(), Checkpoints(workdir, read_only=True) as checkpoints:
        found = checkpoints.restore(program, program.batches())
    if found is None:
        raise none
    return found.state
