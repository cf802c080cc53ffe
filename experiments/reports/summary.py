"""The end of a run: pictures in its folder, and lines with its speed, files and scores."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments import reports
from experiments.common import phases, plots
from experiments.common.phases import phase
from experiments.runs.log import EVENTS, METRICS
from experiments.tasks.task import Params
from experiments.trainer.checkpoints import FOLDER
from experiments.trainer.loop import Result
from experiments.trainer.mesh import Program

TRACE = "profile"


def finish(program: Program, workdir: Path, result: Result) -> None:
    """Print the speed and the scores of a run that was just trained, and leave its pictures.

    All processes call this together.
    """
    config, steps = program.config, program.config.steps - result.start
    params = multihost_utils.process_allgather(result.state.params, tiled=True)
    if steps:
        sizes = ", ".join(f"{axis}={size}" for axis, size in program.mesh.shape.items())
        count = jax.process_count()
        processes = f"; {count} processes" if count > 1 else ""
        phases.say(
            f"{steps} steps on {jax.devices()[0].device_kind} ({sizes}{processes}): "
            f"{result.compiling:.1f} s to compile, {result.running:.1f} s to run"
        )
    else:
        phases.say(f"finished before, at step {result.start}: evaluating it again")
    if config.seeds > 1:
        params = jax.tree.map(lambda x: x[0], params)
    if jax.process_index() == 0:
        report(program.task, params, workdir, result.rows, result.metrics)


def report(
    task: Any, params: Params, workdir: Path, rows: Sequence[dict[str, Any]],
    metrics: Mapping[str, np.ndarray],
) -> None:  # fmt: skip
    """Draw the pictures of a run, and print its files and the score.

    The parameters are of the first seed, the rows those of the log, the test metrics [seeds].
    """
    about = reports.make(task)
    with phase("drawing the pictures"):
        plots.curves(workdir / "curves.png", rows, about.training, about.objective)
        about.draw(params, workdir)
    for line in list_files(workdir):
        phases.say(line)
    phases.say(about.headline(metrics))


def list_files(folder: Path) -> list[str]:
    """Return lines with the files in a run's folder, and the command that shows its curves."""
    pictures = sorted(path.name for path in folder.glob("*.png"))
    names = [METRICS, *pictures, *(f"{name}/" for name in (FOLDER, EVENTS, TRACE))]
    there = [name for name in names if (folder / name).exists()]
    said = [f"written to {folder}: {', '.join(there)}"]
    if (folder / EVENTS).exists():
        said.append(f"its curves, live: tensorboard --logdir={shlex.quote(str(folder / EVENTS))}")
    return said
