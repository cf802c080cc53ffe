"""Measure programs of the package beside others.

    python -m experiments.measure check                  # do the kernels hold on this device?
    python -m experiments.measure compiled --chip=v5e    # bytes, kernels, cycles, without the chip
    python -m experiments.measure timed                  # the same programs, run on this device
    python -m experiments.measure peers --quick          # attention beside other libraries
    python -m experiments.measure decoding               # a decoding step beside theirs
    python -m experiments.measure bits                   # which calls give the same bits?
    python -m experiments.measure lengths --chip=v5e     # memory and bytes by length
    python -m experiments.measure losses                 # does one kernel train as another does?
    python -m experiments.measure tiles --chip=v5e       # cycles of a tile of the TPU kernels
    python -m experiments.measure registers              # those of the kernels for Hopper
    python -m experiments.measure memory                 # of float32 attention on a GPU
    python -m experiments.measure sweeps                 # over edits of each head of a model
    python -m experiments.measure rings                  # the time of a ring for orders of tokens

Each command has --help.
"""

import sys
from collections.abc import Sequence
from typing import Any

from experiments.measure import (
    bits,
    check,
    compiled,
    lengths,
    losses,
    memory,
    registers,
    rings,
    sweeps,
    tiles,
    timed,
)
from experiments.measure.peers import decoding, races
from experiments.runs import command

COMMANDS: dict[str, Any] = {
    "check": check, "compiled": compiled, "timed": timed, "peers": races, "decoding": decoding,
    "bits": bits, "lengths": lengths, "losses": losses, "tiles": tiles, "registers": registers,
    "memory": memory, "sweeps": sweeps, "rings": rings,
}  # fmt: skip


def main(argv: Sequence[str]) -> None:
    """Run a command."""
    parser = command.Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        module.add_flags(commands.add_parser(name, description=module.__doc__))
    flags = parser.parse_args(argv)
    COMMANDS[flags.command].run(flags)


if __name__ == "__main__":
    main(sys.argv[1:])
