"""A trained run, opened on one device to be asked or reported on."""

from pathlib import Path
from typing import Any, NamedTuple

from experiments import tasks
from experiments.phases import Phase
from experiments.runs import rundir
from experiments.runs.failures import RunError
from experiments.runs.fingerprint import fingerprint
from experiments.runs.record import FOLDER
from experiments.trainer import loop, mesh
from experiments.trainer.checkpoints import Checkpoints


class Finished(NamedTuple):
    """A run, its task, and the content of its latest checkpoint."""

    run: rundir.Run
    task: Any
    params: Any
    rows: list[dict[str, Any]]


def open_run(
    workdir: str | Path, data: str | None = None, tokenizer: str | None = None
) -> tuple[rundir.Run, Any]:
    """Return the run in a folder, set to one device, and its task.

    Args:
      workdir: the folder.
      data: the file that the run was trained on, if it was one.
      tokenizer: the file of its tokenizer, if it has one.

    Raises:
      ValueError: if there is no such run, or its data have changed.
    """
    run = rundir.find_run(workdir, {"data.path": data, "data.tokenizer": tokenizer})
    for axis in mesh.AXES:
        run.config.mesh[axis] = 1
    task = tasks.make(run.config)
    run.check_data(fingerprint(task))
    return run, task


def load(run: rundir.Run, task: Any) -> Finished:
    """Return the run with its latest checkpoint.

    Raises:
      RunError: if it has none.
    """
    program, saved = loop.build(run.config, task), None
    if (run.path / FOLDER).is_dir():
        with (
            Phase("reading the checkpoint"),
            program.on_mesh(),
            Checkpoints(run.path, read_only=True) as checkpoints,
        ):
            saved = checkpoints.restore(program, program.batches())
    if saved is None:
        raise RunError(f"{run.path} has no checkpoint yet; train it first")
    return Finished(run, task, saved.state.params, list(saved.log["rows"]))
