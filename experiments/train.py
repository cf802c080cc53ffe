"""Trains a task of experiments/data as a file of configs/ says.

    python -m experiments.train
    python -m experiments.train --config.seeds=5 --config.optimizer.learning_rate=0.001
    python -m experiments.train --workdir=runs/mine    # again: resumes
    python -m experiments.train --profile=10:15         # a trace of these steps, for xprof
    python -m experiments.train --config=configs/digits_sharded.py
    python -m experiments.train --config=configs/pydoc_lm.py --config.data.path=FILE

Without --workdir, results go to a new folder under runs/. Over several processes, each is started
with the same --workdir, on a file system that all of them see, and

    --distributed                                      # SLURM, Cloud TPU, …: JAX finds the others
    --distributed --coordinator_address=HOST:PORT --num_processes=N --process_id=I

The exit status is 0 of a finished run, 75 (EX_TEMPFAIL) of one that SIGTERM or SIGINT stopped after
a checkpoint, which the same command goes on with, and another of one that failed.
"""

import sys
from pathlib import Path

import jax
from absl import app, flags
from jax.experimental import multihost_utils

from experiments import phases, plots, tasks
from experiments.phases import Phase
from experiments.runs import (
    failures,
    hosts,
    log,
    profile,
    rundir,
    settings,
    signals,
    speedup,
    writers,
    written,
)
from experiments.runs.failures import RunError
from experiments.trainer import checkpoints, loop, mesh

DEFAULT = Path(__file__).parent.parent / "configs" / "digits.py"
WORKDIR = flags.DEFINE_string("workdir", None, "Where results go; a run's own folder resumes it.")
DISTRIBUTED = flags.DEFINE_bool("distributed", False, "Train over several processes.")
PROFILE = flags.DEFINE_string(
    "profile", None, "Leaves a trace of some steps in the folder: a number of them, or FIRST:LAST."
)
ADDRESS = flags.DEFINE_string("coordinator_address", None, "HOST:PORT where process 0 listens.")
PROCESSES = flags.DEFINE_integer("num_processes", None, "How many processes there are.")
PROCESS = flags.DEFINE_integer("process_id", None, "Which of them this is, from 0.")
START = flags.DEFINE_integer(
    "start_timeout", 300, "Seconds that the processes have to come together."
)
HEARTBEAT = flags.DEFINE_integer(
    "heartbeat_timeout", 100, "Seconds of silence after which a process is taken for dead."
)


def main(asked: settings.Asked) -> None:
    """Trains, reports, draws; the last line says the score."""
    if not flags.FLAGS["verbosity"].present:
        log.hush()
    try:
        if asked.rest[1:]:
            raise RunError(f"unexpected {asked.rest[1:]}; settings are --config.KEY=VALUE")
        _join()
    except RunError as error:
        sys.exit(f"error: {error}")
    with hosts.ending_together():
        _run(asked)


def _join() -> None:
    cluster = hosts.Cluster(
        ADDRESS.value, PROCESSES.value, PROCESS.value, START.value, HEARTBEAT.value
    )
    if DISTRIBUTED.value:
        with Phase("waiting for the other processes"):
            hosts.start(cluster)
        return
    if (cluster.address, cluster.processes, cluster.process) != (None, None, None):
        raise RunError(
            "--coordinator_address, --num_processes and --process_id are for --distributed, "
            "which is missing"
        )
    cluster.check()


def _run(asked: settings.Asked) -> None:
    try:
        with Phase("reading the data"):
            run, built = _prepare(asked)
    except ValueError as error:
        hosts.agree(None)
        sys.exit(f"error: {error}")
    phases.quiet = jax.process_index() > 0
    try:
        hosts.agree({"config": run.config.to_dict(), "--workdir": str(run.path)})
        run.begin(built.task.fingerprint())
        for name in (rundir.MARK, checkpoints.FOLDER):
            failures.needs(run.path / name)
        _say(f"{'resuming' if run.resumed else 'training'} {run.path}")
        result = loop.train(built, run.path, PROFILE.value)
    except RunError as error:
        sys.exit(f"error: {error}")
    except signals.Stopped as stopped:
        if jax.process_index() == 0:
            print(stopped, file=sys.stderr, flush=True)
        raise
    report(built, run.path, result)


def _prepare(asked: settings.Asked) -> tuple[rundir.Run, mesh.Program]:
    run = rundir.open_run(WORKDIR.value, asked.config, asked.overrides)
    if PROFILE.value is not None:
        profile.parse(PROFILE.value, 0)
    writers.check(run.config)
    forced = hosts.force_host_devices(run.config.mesh.force_host_devices)
    try:
        built = loop.build(run.config, tasks.make(run.config))
        built.check()
    except Exception as error:
        if not run.resumed or isinstance(error, ValueError):
            raise
        # Its config may be anybody's.
        first = (str(error).splitlines() or [""])[0]
        raise RunError(f"{run.path} can't be trained: {type(error).__name__}: {first}") from error
    if forced and jax.default_backend() == "cpu":
        _say(f"this host's cores serve as {forced} devices, as config.mesh.force_host_devices says")
    return run, built


def report(built: mesh.Program, workdir: Path, result: loop.Result) -> None:
    """Prints what came out, beside the baselines, and leaves the pictures."""
    config, task = built.config, built.task
    params = multihost_utils.process_allgather(result.state.params, tiled=True)
    if config.seeds > 1:
        params = jax.tree.map(lambda x: x[0], params)
    steps = config.steps - result.start
    if steps:
        sizes = ", ".join(f"{axis}={size}" for axis, size in built.mesh.shape.items())
        _say(
            f"{steps} steps on {jax.devices()[0].device_kind} ({sizes}{_processes()}): "
            f"{result.compiling:.1f} s to compile, {result.running:.1f} s to run"
        )
    else:
        _say(f"finished before, at step {result.start}: evaluating it again")
    if steps and config.seeds > 1 and jax.process_count() == 1:
        together = result.compiling + result.running
        with Phase("timing one model alone"):
            ratio = speedup.speedup(built, result.compiling)
        _say(
            f"{config.seeds} models in one step took {together:.1f} s; one after another they "
            f"would take {ratio * together:.1f} s ({ratio:.2f}×)"
        )
    if jax.process_index() == 0:
        with Phase("drawing the pictures"):
            plots.curves(workdir / "curves.png", result.rows, task.training, task.objective)
            task.draw(params, workdir)
        with Phase("scoring the baselines"):
            baselines = task.baselines()
        for line in written.lines(workdir):
            _say(line)
        for name, score in baselines.items():
            _say(f"{name} {task.score(score)}")
    _say(task.headline(result.metrics))


def _processes() -> str:
    count = jax.process_count()
    return f"; {count} processes" if count > 1 else ""


def _say(line: str) -> None:
    if jax.process_index() == 0:
        print(line, flush=True)


def _parse(argv: list[str]) -> settings.Asked:
    return settings.parse(argv, DEFAULT)


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)
