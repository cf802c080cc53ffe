"""A trained run, opened on one device to be asked or reported on."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import flags

from experiments import tasks
from experiments.common.devices import AXES
from experiments.common.failures import RunError
from experiments.common.phases import phase
from experiments.runs import folders
from experiments.tasks.task import fingerprint
from experiments.trainer import loop
from experiments.trainer.checkpoints import Checkpoints

DATA = flags.DEFINE_string("data", None, "The file that the run was trained on, if it has moved.")
TOKENIZER = flags.DEFINE_string("tokenizer", None, "The file of its tokenizer, if it has moved.")


class Trained(NamedTuple):
    """A run, its task, and the parameters of its latest checkpoint, of the first seed."""

    run: folders.Run
    task: Any
    params: Any


def define_models() -> tuple[flags.FlagHolder[str | None], flags.FlagHolder[str | None]]:
    """Define and return the flags --workdir and --model, of which one is given."""
    run = flags.DEFINE_string("workdir", None, "A run's folder.")
    model = flags.DEFINE_string("model", None, "A Hugging Face folder.")
    flags.mark_flags_as_mutual_exclusive([run, model], required=True)
    return run, model


def open_run(workdir: str | Path, data: str | None = None, tokenizer: str | None = None) -> Trained:
    """Return the run in a folder with its latest checkpoint, on one device.

    Args:
      workdir: the folder.
      data: where the file that it was trained on is now, if that has moved.
      tokenizer: where the file of its tokenizer is now, if that has moved.
    """
    run = folders.find_run(workdir)
    for axis in AXES:
        run.config.mesh[axis] = 1
    for name, path in (("path", data), ("tokenizer", tokenizer)):
        if path is not None:
            run.config.data[name] = path
    task = tasks.make(run.config)
    run.check_data(fingerprint(task))
    program = loop.build(run.config, task)
    with (
        phase("reading the checkpoint"),
        program.on_mesh(),
        Checkpoints(run.path, read_only=True) as checkpoints,
    ):
        saved = checkpoints.restore(program, program.batches())
    if saved is None:
        raise RunError(f"{run.path} has no checkpoint yet; train it first")
    params = saved.state.params
    if run.config.seeds > 1:
        params = jax.tree.map(lambda x: x[0], params)
    return Trained(run, task, params)
