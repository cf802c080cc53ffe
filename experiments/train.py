"""Trains a task of experiments/data as a file of configs/ says.

    python -m experiments.train
    python -m experiments.train --config.seeds=5 --config.optimizer.learning_rate=0.001
    python -m experiments.train --workdir=runs/mine    # again: resumes

Without --workdir, results go to a new folder under runs/.
"""

import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import app, flags, logging
from jax.experimental import multihost_utils
from ml_collections import config_flags

from experiments import data, plots, program, runs, trainer

DEFAULT = Path(__file__).parent.parent / "configs" / "digits.py"
# No default: ml_collections would parse the overrides now, with messages of its own.
CONFIG = config_flags.DEFINE_config_file("config", None, f"What to train; unless said, {DEFAULT}.")
WORKDIR = flags.DEFINE_string("workdir", None, "Where results go; a run's own folder resumes it.")


def main(argv: Sequence[str]) -> None:
    """Trains, reports, draws; the last line says the score."""
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # orbax tells much at the level below
    try:
        if argv[1:]:
            raise runs.RunError(f"unexpected {argv[1:]}; settings are --config.KEY=VALUE")
        run = runs.open_run(WORKDIR.value, CONFIG.value, _overrides())
        built = program.build(run.config, data.make(run.config))
    except ValueError as error:
        sys.exit(f"error: {error}")
    run.begin()
    _say(f"{'resuming' if run.resumed else 'training'} {run.path}")
    try:
        result = trainer.train(built, run.path)
    except runs.RunError as error:
        sys.exit(f"error: {error}")
    report(built, run.path, result)


def report(built: program.Program, workdir: Path, result: trainer.Result) -> None:
    """Prints what came out, beside the baselines, and leaves the pictures."""
    config, task = built.config, built.task
    params = result.state.params
    if config.seeds > 1:
        params = jax.tree.map(lambda x: x[0], params)
    params = multihost_utils.process_allgather(params, tiled=True)
    steps = config.steps - result.start
    if steps:
        sizes = ", ".join(f"{axis}={size}" for axis, size in built.mesh.shape.items())
        _say(
            f"{steps} steps on {jax.devices()[0].device_kind} ({sizes}): "
            f"{result.compiling:.1f} s to compile, {result.running:.1f} s to run"
        )
    else:
        _say(f"finished before, at step {result.start}: evaluating it again")
    if steps and config.seeds > 1 and jax.process_count() == 1:
        together = result.compiling + result.running
        ratio = trainer.speedup(built, result.compiling)
        _say(
            f"{config.seeds} models in one step took {together:.1f} s; one after another they "
            f"would take {ratio * together:.1f} s ({ratio:.2f}×)"
        )
    if jax.process_index() == 0:
        plots.curves(workdir / "curves.png", result.rows)
        task.draw(params, workdir)
        for name, score in task.baselines().items():
            _say(f"{name} {score:.1%}")
    _say(task.headline(result.metrics))


def _say(line: str) -> None:
    if jax.process_index() == 0:
        print(line, flush=True)


def _overrides() -> dict[str, object]:
    flag = flags.FLAGS["config"]
    chosen = config_flags.get_config_filename(flag) != str(DEFAULT)
    named = CONFIG.value.to_dict() if chosen else {}
    return runs.flatten(named) | config_flags.get_override_values(flag)


def _parse(argv: list[str]) -> list[str]:
    """The parser of absl, after a check of the config's keys with a kinder message."""
    path, keys = None, []
    for i, word in enumerate(argv):
        if match := re.fullmatch(r"--?config(?:=(.*))?", word):
            path = match[1] if match[1] is not None else "".join(argv[i + 1 : i + 2])
        elif match := re.match(r"--?(?:no)?config\.([^=]+)", word):
            keys.append(match[1])
    if path is None:
        path = str(DEFAULT)
        argv = [argv[0], f"--config={path}", *argv[1:]]
    try:
        if not Path(path).is_file():
            raise runs.RunError(f"--config must name a file such as {DEFAULT}, got {path!r}")
        config = runpy.run_path(path)["get_config"]()
        for key in keys:
            runs.check_key(key, config)
    except runs.RunError as error:
        sys.exit(f"error: {error}")
    return app.parse_flags_with_usage(argv)


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)
