"""Time the programs of `compiled` on the device that is here.

    python -m experiments.measure timed
    python -m experiments.measure timed --programs=arrays,decode

The contestants of a program run in turns, with random parameters and inputs. The table has, for
each program and contestant,

    ms           of a run, the median of the rounds
    middle half  of the rounds
    × best       the speed relative to the fastest contestant

The tokens of a step are the last that fit in the cache. The programs are

"""

import argparse
import functools

import jax

from experiments.measure import machine, programs, timing
from experiments.measure.programs import Chip, Entry
from experiments.measure.results import Table, counted
from experiments.measure.timing import Work
from flax_mha import sharding

COLUMNS = "program", "pass", "", "ms", "middle half", "× best"
SECONDS = 2.0  # for a pass of a program
TOTAL = 600.0  # no program begins after this time


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    programs.add_names(parser)


def run(flags: argparse.Namespace) -> None:
    """Time the programs one by one."""
    platform = sharding.platform()
    chip = Chip(jax.devices()[0], platform == "gpu")
    table = Table(flags.workdir, f"timed-{platform}", *COLUMNS, **machine.describe())
    for name, _ in counted("timing", dict.fromkeys(flags.programs), TOTAL):
        listed = [*programs.entries(chip, [name])]
        for passes in dict.fromkeys(entry.passes for entry in listed):
            works = {x.contestant: functools.partial(work, x) for x in listed if x.passes == passes}
            with jax.set_mesh(chip.mesh):
                rows = timing.race(works, 200, SECONDS)
            for contestant, row in rows.items():
                found = {"program": name, "passes": passes, "contestant": contestant, **row}
                table.add(found, f"`{name}`", passes, contestant, *timing.cells(row))
    table.end()


def work(entry: Entry) -> Work:
    """Return a program, compiled, with random arguments."""
    # The tokens of a step are the last that fit in the cache.
    steps = entry.passes == "step"
    position = programs.SLOTS - entry.arguments[-1].shape[1] if steps else -1
    return timing.program(entry.function, programs.fill(entry.arguments, position), steps)
