"""Train a task of experiments/tasks as a file of configs/ says.

    python -m experiments.train
    python -m experiments.train --config=configs/pydoc_lm.py --config.data.path=FILE
    python -m experiments.train --config.seeds=5 --config.optimizer.learning_rate=0.001
    python -m experiments.train --workdir=runs/mine    # again: resumes
    python -m experiments.train --weights=runs/mine    # a new run, which starts from its weights
    python -m experiments.train --profile=10:15    # a trace of these steps, for xprof

Without --workdir, results go to a new folder under runs/. Several processes (--distributed) share a
--workdir on a file system that all of them mount. Where JAX doesn't find the others (it does on
SLURM and Cloud TPU), add --coordinator_address=HOST:PORT --num_processes=N --process_id=I.

The exit status is 0 for a finished run, 75 (EX_TEMPFAIL) for one that SIGTERM or Ctrl-C stopped
after a checkpoint, to be resumed by the same command, and 1 for one that failed.
"""

from pathlib import Path

import jax
from absl import flags

from experiments import tasks
from experiments.common import command, outputs, phases
from experiments.common.counts.memory import check_fits
from experiments.common.devices import force_host_devices
from experiments.common.failures import RunError
from experiments.common.phases import phase
from experiments.reports import summary
from experiments.runs import config, folders, hosts, progress
from experiments.tasks.task import fingerprint
from experiments.trained import run as trained
from experiments.trainer import loop

CONFIG = config.define(Path(__file__).parent.parent / "configs" / "digits.py")
flags.declare_key_flag("config")
WORKDIR = flags.DEFINE_string("workdir", None, "The folder of results; a run's own resumes it.")
WEIGHTS = flags.DEFINE_string("weights", None, "The folder of a run whose parameters start this.")
DISTRIBUTED = flags.DEFINE_bool("distributed", False, "Train over several processes.")
PROFILE = flags.DEFINE_string("profile", None, "The steps to trace, FIRST:LAST.")
ADDRESS = flags.DEFINE_string("coordinator_address", None, "HOST:PORT where process 0 listens.")
PROCESSES = flags.DEFINE_integer("num_processes", None, "The number of processes.")
PROCESS = flags.DEFINE_integer("process_id", None, "The number of this process, from 0.")
START = flags.DEFINE_integer("start_timeout", 300, "Seconds until all have started.", 1)
HEARTBEAT = flags.DEFINE_integer("heartbeat_timeout", 100, "Seconds until one counts as dead.", 1)


def main(argv: list[str]) -> None:
    """Train, then report; the last line is the score."""
    del argv
    asked = config.asked(CONFIG)
    if PROFILE.value is not None:
        progress.parse_steps(PROFILE.value)
    if DISTRIBUTED.value:
        phases.quiet = bool(PROCESS.value)
        timeouts = START.value, HEARTBEAT.value
        with phase("waiting for the other processes"):
            hosts.start(ADDRESS.value, PROCESSES.value, PROCESS.value, *timeouts)
    elif (ADDRESS.value, PROCESSES.value, PROCESS.value) != (None, None, None):
        raise RunError("--coordinator_address, --num_processes and --process_id need --distributed")

    def prepare() -> tuple[folders.Run, loop.Program, str]:
        run = folders.open_run(WORKDIR.value, asked)
        if forced := force_host_devices(run.config.mesh.force_host_devices):
            phases.say(f"config.mesh.force_host_devices: the cores serve as {forced} devices")
        if WEIGHTS.value is not None:
            folders.find_run(WEIGHTS.value, "--weights")
        program = loop.build(run.config, tasks.make(run.config))
        check_fits(program)
        return run, program, fingerprint(program.task)

    with phase("reading the data"):
        run, program, data = hosts.all_or_none(prepare)
    weights = run.begin(data, WEIGHTS.value and str(outputs.local(WEIGHTS.value)))
    phases.quiet = jax.process_index() > 0
    phases.say(f"{'resuming' if run.began else 'training'} {run.path}")
    result = loop.train(
        program,
        run.path,
        PROFILE.value,
        lambda: trained.open_run(weights).params if weights else None,
    )
    summary.finish(program, run.path, result)


if __name__ == "__main__":
    command.run(main)
