"""Measure programs of the package next to others.

    python -m experiments.measure check                  # do the kernels hold on this device?
    python -m experiments.measure compiled --chip=v5e    # bytes, kernels, cycles, without the chip
    python -m experiments.measure timed                  # the same programs, run on this device
    python -m experiments.measure peers --quick          # attention next to other libraries
    python -m experiments.measure bits                   # which calls give the same bits?
    python -m experiments.measure lengths --chip=v5e     # memory and bytes by length
    python -m experiments.measure losses                 # does one kernel train as another does?
    python -m experiments.measure conventions            # do other packages do what our page says?

Each command has --help. Tables are printed row by row, and are also in table.md and results.json
in --workdir.
"""

import sys
from collections.abc import Sequence
from typing import Any

from experiments.common import command
from experiments.common.failures import boundary
from experiments.measure import bits, check, compiled, lengths, losses, timed
from experiments.measure.conventions import compare
from experiments.measure.peers import race

COMMANDS: dict[str, Any] = {
    "check": check, "compiled": compiled, "timed": timed, "peers": race, "bits": bits,
    "lengths": lengths, "losses": losses, "conventions": compare,
}  # fmt: skip


def main(argv: Sequence[str]) -> None:
    """Run a command."""
    parser = command.Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        one = commands.add_parser(name, description=module.__doc__)
        module.add_flags(one)
        where = "a new or empty folder for the results (default: a new one under runs/)"
        one.add_argument("--workdir", metavar="FOLDER", help=where)
    flags = parser.parse_args(argv)
    COMMANDS[flags.command].run(flags)


if __name__ == "__main__":
    with boundary():
        main(sys.argv[1:])
