"""A trained run, opened on one device to be asked or reported on."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import flags

from experiments import tasks
from experiments.phases import Phase
from experiments.runs import rundir
from experiments.runs.failures import RunError
from experiments.runs.fingerprint import fingerprint
from experiments.runs.record import FOLDER
from experiments.trainer import loop, mesh
from experiments.trainer.checkpoints import Checkpoints

DATA = flags.DEFINE_string("data", None, "The file that the run was trained on, if it was one.")
TOKENIZER = flags.DEFINE_string("tokenizer", None, "The file of the run's tokenizer, if any.")


class Finished(NamedTuple):
    """A run, its task, and the content of its latest checkpoint: parameters of the first seed."""

    run: rundir.Run
    task: Any
    params: Any
    rows: list[dict[str, Any]]


def define_models() -> tuple[flags.FlagHolder[str | None], flags.FlagHolder[str | None]]:
    """Define and return the flags --workdir and --model, of which one is given."""
    run = flags.DEFINE_string("workdir", None, "A run's folder.")
    model = flags.DEFINE_string("model", None, "A Hugging Face folder.")
    flags.mark_flags_as_mutual_exclusive([run, model], required=True)
    return run, model


def open_run(
    workdir: str | Path, data: str | None = None, tokenizer: str | None = None
) -> tuple[rundir.Run, Any]:
    """Return the run in a folder, set to one device, and its task.

    The files that the run was trained on, and that of its tokenizer, have to be named again.
    """
    run = rundir.find_run(workdir, {"data.path": data, "data.tokenizer": tokenizer})
    for axis in mesh.AXES:
        run.config.mesh[axis] = 1
    task = tasks.make(run.config)
    run.check_data(fingerprint(task))
    return run, task


def load(run: rundir.Run, task: Any) -> Finished:
    """Return the run with its latest checkpoint."""
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
    params = saved.state.params
    if run.config.seeds > 1:
        params = jax.tree.map(lambda x: x[0], params)
    return Finished(run, task, params, list(saved.log["rows"]))
