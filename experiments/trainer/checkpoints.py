"""The states of a run on disk, by Orbax, each with checksums of its files.

Orbax keeps no checksum of data: a flipped bit would be restored as another number.
"""

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from experiments.common import phases
from experiments.common.failures import RunError
from experiments.common.outputs import write_json
from experiments.runs import hosts
from experiments.trainer.mesh import Program

FOLDER, DAMAGED, MANIFEST = "checkpoints", "checkpoints.damaged", "sha256.json"


class Saved(NamedTuple):
    """The content of a checkpoint."""

    step: int
    state: Any
    pending: Any  # see `Log.pending`


class Checkpoints:
    """The last checkpoints of a run, and the best.

    A step has the items `state`, the arrays, and `run`, JSON, and the SHA-256 of each file. If the
    newest is damaged, that is said in words, it is moved out of the way, and an older one is taken.
    All processes call the methods together.

    Args:
      workdir: the run's folder.
      keep_last: the number of latest checkpoints to keep.
      keep_best: the number of checkpoints with the lowest test loss to keep as well.
      read_only: True to change nothing in the folder, and save nothing.
    """

    def __init__(
        self, workdir: Path, keep_last: int = 2, keep_best: int = 0, read_only: bool = False
    ) -> None:
        self._workdir, self._folder = workdir.absolute(), workdir.absolute() / FOLDER
        self._latest, damaged = self._find()
        self._manager: ocp.CheckpointManager | None = None
        if read_only:
            return
        self._set_aside(damaged)
        lowest = BestN(
            get_metric_fn=_loss, reverse=True, n=keep_best, keep_checkpoints_without_metrics=False
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy([LatestN(keep_last), lowest]),
            # Without them Orbax 0.12.8 forgets the losses at the end of the process, and a resumed
            # run deletes its best checkpoint.
            best_fn=_loss, best_mode="min",
            # So that the checksums are of files that are written.
            enable_async_checkpointing=False,
        )  # fmt: skip
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def _find(self) -> tuple[int | None, list[int]]:
        """Return the step of the newest whole checkpoint, if any, and damaged ones after it."""
        names = [path.name for path in self._folder.glob("*") if path.name.isdecimal()]
        damaged: list[int] = []
        for step in sorted(map(int, names), reverse=True):
            reason = hosts.from_first(functools.partial(damage, self._folder / str(step)))
            if not reason:
                return step, damaged
            phases.say(f"the checkpoint of step {step} is damaged: {reason}")
            damaged.append(step)
        # A process that was killed during its first save has left one without a manifest.
        if any((self._folder / str(step) / MANIFEST).exists() for step in damaged):
            raise RunError(
                f"{self._workdir} has no checkpoint that is whole; restore one of a copy of yours "
                f"to {self._folder}, or choose a new --workdir"
            )
        return None, damaged

    def _set_aside(self, steps: Sequence[int]) -> None:
        if steps and jax.process_index() == 0:
            aside = self._workdir / DAMAGED
            aside.mkdir(exist_ok=True)
            for step in steps:
                place = aside / f"{step}-{len(list(aside.iterdir()))}"
                (self._folder / str(step)).rename(place)
                phases.say(f"it was moved to {place}")
        hosts.all_or_none(lambda: None)  # waits for process 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._manager is not None:
            self._manager.close()

    def save(self, step: int, state: Any, data: Any, pending: Any, loss: float | None) -> None:
        """Write a checkpoint.

        Args:
          step: the step that was just trained.
          state: the arrays.
          data: the iterator of the batches.
          pending: see `Log.pending`.
          loss: the test loss at this step; None if it was not tested.
        """
        assert self._manager is not None
        run = {"data": data.get_state(), "pending": pending}
        items = {"state": ocp.args.StandardSave(state), "run": ocp.args.JsonSave(run)}
        # Orbax takes NaN for the best of all.
        metrics = None if loss is None else {"loss": math.inf if math.isnan(loss) else loss}
        self._manager.save(step, args=ocp.args.Composite(**items), metrics=metrics)
        if jax.process_index() == 0:
            folder = self._folder / str(step)
            write_json(folder / MANIFEST, checksums(folder))

    def restore(self, program: Program, data: Any) -> Saved | None:
        """Return the newest whole checkpoint, or None, and move the data's iterator there."""
        if self._latest is None:
            return None
        folder = self._folder / str(self._latest)
        with ocp.StandardCheckpointer() as arrays:
            state = arrays.restore(folder / "state", program.abstract_state())
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as json_files:
            run = json_files.restore(folder / "run")
        data.set_state(run["data"])
        return Saved(self._latest, state, run["pending"])


def _loss(metrics: Any) -> float:
    loss: float = metrics["loss"]
    return loss


def checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a checkpoint, by its path in the folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST]
    sums = {}
    for path in files:
        with path.open("rb") as file:
            sums[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def damage(folder: Path) -> str:
    """Return what is wrong with the files of a checkpoint, or "" if they are as they were saved."""
    try:
        expected = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return f"it has no {MANIFEST}: it was not finished, or lost files"
    found = checksums(folder)
    wrong = sorted(name for name in expected | found if expected.get(name) != found.get(name))
    return f"{wrong[0]} is not what was saved, of {len(wrong)} such files" if wrong else ""
