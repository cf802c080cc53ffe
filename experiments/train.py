"""Train a task of experiments/tasks as a file of configs/ says.

    python -m experiments.train
    python -m experiments.train --config=configs/pydoc_lm.py --config.data.path=FILE
    python -m experiments.train --config.seeds=5 --config.optimizer.learning_rate=0.001
    python -m experiments.train --workdir=runs/mine    # again: resumes
    python -m experiments.train --profile=10:15         # a trace of these steps, for xprof

Without --workdir, results go to a new folder under runs/. Several processes (--distributed) share a
--workdir on a file system that all see. Where JAX does not find the others (SLURM, Cloud TPU), add
--coordinator_address=HOST:PORT --num_processes=N --process_id=I.

The exit status is 0 of a finished run, 75 (EX_TEMPFAIL) of one that SIGTERM or SIGINT stopped after
a checkpoint, to be resumed by the same command, and another of one that failed.
"""

import functools
from pathlib import Path

from absl import app, flags

from experiments import tasks
from experiments.reports import summary
from experiments.runs import hosts, settings, start
from experiments.trainer import loop

DEFAULT = Path(__file__).parent.parent / "configs" / "digits.py"
WORKDIR = flags.DEFINE_string("workdir", None, "Where results go; a run's own folder resumes it.")
DISTRIBUTED = flags.DEFINE_bool("distributed", False, "Train over several processes.")
PROFILE = flags.DEFINE_string("profile", None, "The steps to trace: a number, or FIRST:LAST.")
ADDRESS = flags.DEFINE_string("coordinator_address", None, "HOST:PORT where process 0 listens.")
PROCESSES = flags.DEFINE_integer("num_processes", None, "The number of processes.")
PROCESS = flags.DEFINE_integer("process_id", None, "The number of this process, from 0.")
START = flags.DEFINE_integer("start_timeout", 300, "Seconds until all have started.", 1)
HEARTBEAT = flags.DEFINE_integer("heartbeat_timeout", 100, "Seconds until it is dead.", 1)


def main(asked: settings.Asked) -> None:
    """Train, then report; the last line is the score."""
    cluster = (ADDRESS.value, PROCESSES.value, PROCESS.value, START.value, HEARTBEAT.value)
    with start.joined(DISTRIBUTED.value, hosts.Cluster(*cluster)):
        run, program = start.begin(asked, WORKDIR.value, PROFILE.value, tasks.make, loop.build)
        result = loop.train(program, run.path, PROFILE.value)
        summary.finish(program, run.path, result)


if __name__ == "__main__":
    app.run(main, flags_parser=functools.partial(settings.parse, default=DEFAULT))
