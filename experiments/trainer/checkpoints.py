"""The states of a run on disk, by Orbax, each beside a record that proves it whole.

A step has two items: `state`, the arrays, and `run`, JSON (see `experiments.runs.record`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, LatestN

from experiments.runs import record
from experiments.runs.record import FOLDER, DamagedError, Saved
from experiments.trainer.mesh import Program


class Checkpoints:
    """The last checkpoints of a run, and the best.

    It is a context, at whose end all are written.

    Args:
      workdir: the run's folder.
      keep_last: the number of latest checkpoints to keep.
      keep_best: the number of checkpoints with the lowest test loss to keep beside them.
      read_only: True to change nothing in the folder.
    """

    def __init__(
        self, workdir: Path, keep_last: int = 2, keep_best: int = 0, read_only: bool = False
    ) -> None:
        self._folder, self._read_only = workdir.absolute(), read_only
        self._best = record.Best(keep_best)
        self._keep = AnyPreservationPolicy([LatestN(keep_last), self._best])
        self._open()

    def _open(self) -> None:
        write = not self._read_only
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._keep, create=write, cleanup_tmp_directories=write
        )
        handlers = {"state": ocp.StandardCheckpointHandler(), "run": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(
            self._folder / FOLDER, options=options, item_names=(*handlers,), item_handlers=handlers
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def save(self, step: int, state: Any, data: Any, log: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint, whose end the next save waits for."""
        sealed = record.seal(step, state, data.get_state(), log)
        self._best.read(log)
        items = {"state": ocp.args.StandardSave(state), "run": ocp.args.JsonSave(sealed)}
        self._manager.save(step, args=ocp.args.Composite(**items))

    def wait(self) -> None:
        """Wait until all is written."""
        self._manager.wait_until_finished()

    def restore(self, program: Program, data: Any) -> Saved | None:
        """Return the latest whole checkpoint, or None, and move the data's iterator there."""
        damaged: list[int] = []
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                saved = self._read(step, program, data)
            except DamagedError as error:
                damaged.append(record.report(step, error))
                continue
            if damaged and not self._read_only:
                self._manager.close()
                record.set_aside(self._folder, damaged)
                self._open()
            self._best.read(saved.log)
            return saved
        record.check_none(self._folder, damaged)
        return None

    def _read(self, step: int, program: Program, data: Any) -> Saved:
        with record.reading():
            run = self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))
        run = record.check(run["run"], step, data.get_state())
        abstract = program.abstract_state()
        record.check_model(run, abstract)
        items = {"state": ocp.args.StandardRestore(abstract)}
        with record.reading(step):
            state = self._manager.restore(step, args=ocp.args.Composite(**items))["state"]
        record.check_arrays(run, state)
        data.set_state(run["data"])
        return Saved(step, state, run["log"])
