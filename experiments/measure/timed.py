"""Time the programs of `compiled` on the device that is here.

    python -m experiments.measure timed
    python -m experiments.measure timed --programs=arrays,decode --seconds=4

The contestants of a program run in turns, with random parameters and inputs. The table has, for
each program and contestant,

    ms           of a run, the median of the rounds
    middle half  of the rounds
    × best       the ratio to the fastest contestant
    compile      seconds to trace and to compile

The tokens of a step are the last that fit in the cache. The programs are

"""

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import jax

from experiments.measure import machine, programs, timing
from experiments.measure.programs import Chip, Entry
from experiments.measure.results import Table, counted
from experiments.measure.timing import Timing, Work
from experiments.runs import command
from flax_mha import sharding

COLUMNS = "program", "pass", "", "ms", "middle half", "× best", "compile"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    programs.add_names(parser)
    add = parser.add_argument
    add("--seconds", type=command.seconds, default=2.0, help="time for a program (2)")
    add("--total", type=command.seconds, default=600.0, help="nothing new begins after it (600)")


def run(flags: argparse.Namespace) -> None:
    """Time the programs one by one."""
    platform = sharding.platform()
    chip = Chip(jax.devices()[0], platform == "gpu")
    table = Table(flags.workdir, f"timed-{platform}", *COLUMNS, **machine.describe())
    for name, _ in counted("timing", dict.fromkeys(flags.programs), flags.total):
        listed = [*programs.entries(chip, [name])]
        for passes in dict.fromkeys(entry.passes for entry in listed):
            with jax.set_mesh(chip.mesh):
                race([x for x in listed if x.passes == passes], flags.seconds, table)
    table.end()


def race(entries: Sequence[Entry], seconds: float, table: Table) -> None:
    """Add the times of the contestants of a program to a table."""
    works = {x.contestant: timing.attempt(functools.partial(work, x)) for x in entries}
    found = timing.interleave(works, 200, seconds)
    best = min((x.median for x in found.values() if isinstance(x, Timing)), default=0.0)
    for entry in entries:
        time = found[entry.contestant]
        row: dict[str, Any] = {
            "program": entry.program, "passes": entry.passes, "contestant": entry.contestant,
        }  # fmt: skip
        cells = f"`{entry.program}`", entry.passes, entry.contestant
        if not isinstance(time, Timing):
            table.add(row | {"reason": time.reason}, *cells, f"failed: {time.reason}")
            continue
        compiled = works[entry.contestant].compile
        median, q1, q3 = (1000 * x for x in time[:3])
        row |= {"milliseconds": [median, q1, q3], "ratio": time.median / best, "compile": compiled}
        table.add(row, *cells, f"{median:.3f}", f"{q1:.3f}–{q3:.3f}", f"{row['ratio']:.2f}",
                  f"{compiled:.1f} s")  # fmt: skip


def work(entry: Entry) -> Work:
    """Return a program, compiled, with random arguments."""
    # The tokens of a step are the last that fit in the cache.
    position = programs.SLOTS - entry.arguments[-1].shape[1] if entry.donated else None
    arguments = programs.fill(entry.arguments, position)
    return timing.program(entry.function, arguments, bool(entry.donated))
