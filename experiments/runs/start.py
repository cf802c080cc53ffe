"""The start of a run: its processes, its folder, and a program that fits the machine."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
from ml_collections import ConfigDict

from experiments import phases
from experiments.phases import Phase
from experiments.runs import (
    checks,
    failures,
    hosts,
    progress,
    record,
    rundir,
    settings,
    signals,
    writers,
)
from experiments.runs.failures import RunError
from experiments.runs.fingerprint import fingerprint


@contextlib.contextmanager
def joined(distributed: bool, cluster: hosts.Cluster) -> Iterator[None]:
    """Join the other processes, if distributed, and end all of them on an error inside."""
    if distributed:
        with Phase("waiting for the other processes"):
            hosts.start(cluster)
    elif (cluster.address, cluster.processes, cluster.process) != (None, None, None):
        raise RunError(
            "--coordinator_address, --num_processes and --process_id are for --distributed, "
            "which is missing"
        )
    cluster.check()
    with hosts.ending_together():
        try:
            yield
        except signals.Stopped as stopped:
            if jax.process_index() == 0:
                print(stopped, file=sys.stderr, flush=True)
            raise


def begin(
    asked: settings.Asked,
    workdir: str | None,
    steps: str | None,
    make: Callable[[ConfigDict], Any],
    build: Callable[[ConfigDict, Any], Any],
) -> tuple[rundir.Run, Any]:
    """Return the run of a folder, new or resumed, and its program, which all processes agree on.

    Args:
      asked: the command line.
      workdir: the folder; None for a new one.
      steps: the steps to trace, as --profile names them; None for none.
      make: a function from a config to its task.
      build: a function from a config and its task to an `experiments.trainer.mesh.Program`.
    """
    try:
        with Phase("reading the data"):
            run = rundir.open_run(workdir, asked.config, asked.overrides)
            if steps is not None:
                progress.parse_steps(steps, 0)
            writers.check(run.config)
            forced = hosts.force_host_devices(run.config.mesh.force_host_devices)
            program = build(run.config, make(run.config))
            checks.check_fits(program)
            data = fingerprint(program.task)
    except BaseException:
        hosts.agree(None)
        raise
    phases.quiet = jax.process_index() > 0
    if forced and jax.default_backend() == "cpu":
        said = "as config.mesh.force_host_devices says"
        phases.say(f"this host's cores serve as {forced} devices, {said}")
    same = {"config": run.config.to_dict(), "--workdir": str(run.path), **rundir.settings()}
    hosts.agree({"the SHA-256 of the data": data, **same})
    run.begin(data)
    for name in (rundir.MARK, record.FOLDER):
        failures.needs(run.path / name)
    phases.say(f"{'resuming' if run.resumed else 'training'} {run.path}")
    return run, program
