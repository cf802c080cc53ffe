"""Compile programs for a chip that need not be there, and read their costs.

    python -m experiments.measure compiled --chip=v5e
    python -m experiments.measure compiled --chip=h200 --programs=arrays,decode --top=10

Nothing runs. The table has, for each program and contestant,

    MiB      moved to and from the chip's main memory in a run, and the ratio to the one by hand;
             "≥" if a loop's number of turns depends on values, which count as one turn
    kernels  started in a run
    Mcycles  estimated by the compiler; on TPUs, without Pallas kernels
    held     MiB of temporaries, beside arguments and results
    seconds  to trace and to compile on this machine

--top=n prints the n instructions of each program that move most, with their lines of Python. The
table, as table.md, and results.json go to --workdir (default: a new folder under runs/).
"""

import argparse
import contextlib
import re
import time
from collections.abc import Sequence
from typing import Any

import jax

from experiments import libtpu, tables
from experiments.counts import traffic
from experiments.counts.hlo import Module
from experiments.measure import programs
from experiments.measure.programs import Chip, Entry
from experiments.measure.timing import reason
from experiments.phases import Phase
from experiments.plan import devices, gpus
from experiments.plan.compiled import dumped
from experiments.runs import folders
from experiments.runs.failures import RunError

TPUS = {
    "v4": "2x2x1", "v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2", "tpu7x": "2x2x1",
}  # fmt: skip
MIB = 2**20
Row = dict[str, Any]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_chip(parser)
    programs.add_names(parser)
    parser.add_argument("--top", type=int, default=0, metavar="N")
    parser.add_argument("--workdir", metavar="FOLDER")


def add_chip(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the chip to compile for."""
    parser.add_argument("--chip", choices=[*TPUS, *sorted(gpus.TARGETS)], default="v5e")


def run(flags: argparse.Namespace) -> None:
    """Compile the programs one by one, and print and write the table."""
    folder = folders.result_folder(flags.workdir, f"compiled-{flags.chip}")
    chip = chip_of(flags.chip)
    rows: list[Row] = []
    refused: list[str] = []
    print(HEAD, flush=True)
    for entry in programs.entries(chip, flags.programs):
        with Phase(f"compiling {entry.program}, {entry.passes}, {entry.contestant}"):
            try:
                row = measure(chip, entry, flags.top)
            except Exception as error:
                if entry.contestant != "tokamax":
                    raise
                # A library of others does not know every chip.
                refused.append(f"`{entry.program}`, {entry.passes}, tokamax: {reason(error)}")
                print(refused[-1], flush=True)
                continue
        rows.append(row)
        print(line(row, rows), flush=True)
        for moved in row["top"]:
            print(f"    {moved['MiB']:8.1f} MiB  {moved['times']:3d} × {moved['opcode']:22s} "
                  f"{moved['source']:34s} {moved['name']}")  # fmt: skip
    # With the ratios to contestants that came later.
    table = "\n\n".join(["\n".join([HEAD, *(line(row, rows) for row in rows)]), *refused])
    print(f"\n{table}\n\n{tables.write(folder, table, {'chip': flags.chip, 'rows': rows})}")


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
    start = time.perf_counter()
    with jax.set_mesh(chip.mesh):
        # A fresh function, so that nothing is traced already.
        jitted = jax.jit(lambda *arguments: entry.function(*arguments),
                         donate_argnums=entry.donated)  # fmt: skip
        lowered = jitted.lower(*entry.arguments)
        traced = time.perf_counter()
        text, found = dumped(lowered)
    end = time.perf_counter()
    # Unlike the compiler's dump, it has estimates of cycles, if this jaxlib can read the program.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        text = found.as_text() or text
    module = Module(text)
    moved = sorted(traffic.walk(module, usual=True), key=lambda one: -one.times * one.bytes)
    stats: Any = found.memory_analysis()
    return {
        "program": entry.program, "passes": entry.passes, "contestant": entry.contestant,
        "MiB": sum(one.times * one.bytes for one in moved) / MIB,
        "least": bool(module.unknown),
        "kernels": sum(one.times for one in moved),
        "Mcycles": None if chip.is_gpu else sum(one.times * _cycles(one) for one in moved) / 1e6,
        "held": stats.temp_size_in_bytes / MIB,
        "traced": traced - start, "compiled": end - traced,
        "top": [
            {
                "MiB": one.times * one.bytes / MIB, "times": one.times,
                "opcode": one.instruction.opcode, "source": module.source(one.instruction),
                "name": _scope(one.instruction.rest),
            }
            for one in moved[:top]
        ],
    }  # fmt: skip


HEAD = tables.head(
    "program", "pass", "", "MiB", "× by hand", "kernels", "Mcycles", "held", "traced", "compiled"
)


def line(row: Row, rows: Sequence[Row]) -> str:
    """Return a row's line of the table in Markdown."""
    hand = [
        other["MiB"] for other in rows
        if other["contestant"] == "hand"
        and (other["program"], other["passes"]) == (row["program"], row["passes"])
    ]  # fmt: skip
    ratio = f"{row['MiB'] / hand[0]:.2f}" if hand and not row["least"] else ""
    cycles = "" if row["Mcycles"] is None else f"{row['Mcycles']:.2f}"
    return tables.line(
        f"`{row['program']}`", row["passes"], row["contestant"],
        f"{'≥ ' * row['least']}{row['MiB']:,.0f}", ratio, str(row["kernels"]), cycles,
        f"{row['held']:,.0f}", f"{row['traced']:.1f} s",
        f"{row['compiled']:.1f} s",
    )  # fmt: skip


def _cycles(moved: traffic.Moved) -> int:
    found = re.search(r'"estimated_cycles":"(\d+)"', moved.instruction.rest)
    return int(found[1]) if found else 0


def _scope(rest: str) -> str:
    """Return the end of an operation's name in JAX, which names modules."""
    found = re.search(r'op_name="([^"]*)"', rest)
    return found[1][-60:] if found else ""
