"""Compile programs for a chip that need not be there, and read their costs.

    python -m experiments.measure compiled --chip=v5e
    python -m experiments.measure compiled --chip=h200 --programs=arrays,decode --top=10

Nothing runs. The table has, for each program and contestant,

    MiB        moved to and from the chip's main memory in a run; "≥" if the number of turns of a
               loop depends on values, because such a loop counts as one turn
    kernels    started in a run
    Mcycles    estimated by the compiler for TPUs, without Pallas kernels
    held       MiB of temporaries, besides arguments and results
    compiled   the seconds that it took on this machine

--top=N also prints the N instructions of each program that move most, with their names in JAX.
The programs are

"""

import argparse
import contextlib
import re
import time
from typing import Any

import jax

from experiments.common import libtpu
from experiments.common.counts import traffic
from experiments.common.counts.hlo import Module
from experiments.common.failures import RunError
from experiments.measure import programs
from experiments.measure.programs import Chip, Entry
from experiments.measure.results import Table, counted
from experiments.plan import devices, gpus
from experiments.plan.compiled import dumped

TPUS = {
    "v4": "2x2x1", "v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2", "tpu7x": "2x2x1",
}  # fmt: skip
COLUMNS = "program", "pass", "", "MiB", "kernels", "Mcycles", "held", "compiled"
MIB = 2**20
CYCLES = r'"estimated_cycles":"(\d+)"'
Row = dict[str, Any]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_chip(parser)
    programs.add_names(parser)
    parser.add_argument("--top", type=int, default=0, help="largest instructions to print")


def add_chip(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the chip to compile for."""
    names = [*TPUS, *sorted(gpus.TARGETS)]
    parser.add_argument("--chip", choices=names, default="v5e", help="default: v5e")


def run(flags: argparse.Namespace) -> None:
    """Compile the programs one by one."""
    chip = chip_of(flags.chip)
    table = Table(flags.workdir, f"compiled-{flags.chip}", *COLUMNS, chip=flags.chip)
    for name, _ in counted("compiling", dict.fromkeys(flags.programs)):
        for entry in programs.entries(chip, [name]):
            cells = f"`{name}`", entry.passes, entry.contestant
            try:
                row = measure(chip, entry, flags.top)
            except Exception as error:
                if entry.contestant != "tokamax":
                    raise
                # Another library doesn't know every chip.
                table.add({"program": name, "reason": str(error)}, *cells, repr(error)[:200])
                continue
            table.add(
                row, *cells, f"{'≥ ' * row['least']}{row['MiB']:,.0f}", row["kernels"],
                "" if chip.is_gpu else f"{row['Mcycles']:.2f}", f"{row['held']:,.0f}",
                f"{row['compiled']:.1f} s",
            )  # fmt: skip
            for moved in row["top"]:
                print(f"    {moved['MiB']:8.1f} MiB  {moved['times']:3d} × {moved['opcode']:22s} "
                      f"{moved['source']}")  # fmt: skip
    table.end()


def chip_of(name: str) -> Chip:
    """Return a chip to compile for."""
    libtpu.compiler_only()
    # Nothing runs, so JAX need not start this machine's devices.
    jax.config.update("jax_platforms", "cpu")
    topology = f"{name}:{TPUS.get(name, 1)}"
    try:
        return Chip(devices.of(topology)[0], name in gpus.TARGETS)
    except RunError as error:
        said = str(error).replace(f"--topology={topology}", f"--chip={name}")
        raise RunError(said) from error


def measure(chip: Chip, entry: Entry, top: int = 0) -> Row:
    """Compile a program, and return its costs."""
    with jax.set_mesh(chip.mesh):
        # A fresh function, so that nothing is traced already. A step replaces its cache.
        jitted = jax.jit(lambda *arguments: entry.function(*arguments),
                         donate_argnums=(0,) if entry.passes == "step" else ())  # fmt: skip
        lowered = jitted.lower(*entry.arguments)
        start = time.perf_counter()
        text, program = dumped(lowered)
    seconds = time.perf_counter() - start
    # Unlike the compiler's dump, it has estimates of cycles, if this jaxlib can read the program.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        text = program.as_text() or text
    module = Module(text, usual=True)
    moved = sorted(traffic.walk(module), key=lambda one: -one.times * one.bytes)
    stats: Any = program.memory_analysis()
    cycles = [one.times * int(found[1]) for one in moved
              if (found := re.search(CYCLES, one.instruction.rest))]  # fmt: skip
    return {
        "program": entry.program, "passes": entry.passes, "contestant": entry.contestant,
        "MiB": sum(one.times * one.bytes for one in moved) / MIB,
        "least": bool(module.unknown),
        "kernels": sum(one.times for one in moved),
        "Mcycles": sum(cycles) / 1e6,
        "held": stats.temp_size_in_bytes / MIB,
        "compiled": seconds,
        "top": [
            {
                "MiB": one.times * one.bytes / MIB, "times": one.times,
                "opcode": one.instruction.opcode, "source": one.instruction.source,
            }
            for one in moved[:top]
        ],
    }  # fmt: skip
