"""Measure the time and memory of attention beside its peers.

    python -m experiments.benchmark --quick
    python -m experiments.benchmark --parts=core --lengths=1024,4096 --contestants=ours,jax-xla
    python -m experiments.benchmark --parts=layer --dtypes=bfloat16 --workdir=runs/mine
    python -m experiments.benchmark --decode

Every race is interleaved: its contestants run in turns, and their medians are compared. Tables are
printed, and table.md and results.json go to --workdir (default: a new folder under runs/).
"""

import argparse
import datetime
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

# Before jax starts: other libraries need memory of the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from experiments import tables
from experiments.benchmark import cases, contestants, decoding, races
from experiments.measure import machine
from experiments.phases import Phase
from experiments.runs import command, folders
from experiments.runs.failures import RunError

QUICK = {
    "lengths": (128, 1024, 4096), "masks": ("causal",), "dtypes": ("float32",), "memory": (4096,),
    "seconds": 1.5, "total": 80.0,
}  # fmt: skip


def main(argv: Sequence[str]) -> None:
    """Run race after race, and report each as it ends."""
    flags = parse(argv)
    _check(flags)
    folder = folders.result_folder(flags.workdir, "benchmark")
    started = time.perf_counter()
    end = started + flags.total
    header: dict[str, Any] = {
        "program": "experiments.benchmark", "command": sys.argv,
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine.describe(), "ceilings": {},
    }  # fmt: skip
    _introduce(header["machine"])
    if flags.decode:
        decoding.run(flags, folder, header, end)
        return
    rows: list[races.Row] = []
    texts: list[str] = []
    for race in races.plan(flags):
        header["ceilings"] |= machine.ceilings([race.case.dtype], header["ceilings"])
        with Phase(f"timing {race.case}"):
            found = races.run(race, flags.repeats, flags.seconds, end)
        rows += found
        races.compare(rows, header["ceilings"])
        texts.append(races.table(found))
        print(f"{texts[-1]}\n", flush=True)
        header["seconds"] = time.perf_counter() - started
        table = "\n\n".join([*texts, races.ratios(rows)])
        place = tables.write(folder, table, {**header, "rows": rows})
    print(f"{races.ratios(rows)}\n{header['seconds']:.0f} s; {place}")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the flags, with defaults of --quick or of a full run."""
    parser = command.Parser(__doc__)
    among, count = command.among, command.count
    add = parser.add_argument
    add("--quick", action="store_true", help="a few cases, within 2 minutes")
    add("--decode", action="store_true", help="decoding steps, instead of layer and core")
    add("--parts", type=among(cases.PARTS), default=cases.PARTS, help="the parts: layer, core")
    add("--passes", type=among(cases.PASSES), default=cases.PASSES,
        help="forward, or backward (both passes together)")  # fmt: skip
    add("--masks", type=among(cases.MASKS), default=cases.MASKS[:2],
        help="causal, full, packed (causal with documents)")  # fmt: skip
    add("--dtypes", type=among(cases.DTYPES), help="float32, bfloat16, float16")
    names = contestants.names()
    add("--contestants", type=among(names), help=", ".join(names))
    add("--lengths", type=_counts, help="sequence lengths such as 128,1024, or cache slots")
    add("--batch", type=count, help="sequences per batch (default: from --tokens)")
    add("--tokens", type=count, help="tokens per batch (default: 2,048)")
    add("--documents", type=count, default=8, help="documents packed into a sequence (default: 8)")
    add("--kv_heads", type=count, default=0, help="key/value heads of cores (default: --heads)")
    add("--heads", type=count, default=8, help="attention heads (default: 8)")
    add("--features", type=count, default=512, help="model features (default: 512)")
    add("--window", type=count, default=0, help="the number of near tokens that a query sees")
    add("--memory", type=_lengths, default=(128, 1024, 4096, 16384),
        help="lengths for memory and compile time, or none")  # fmt: skip
    add("--repeats", type=count, default=200, help="the maximum number of rounds of a race")
    add("--seconds", type=command.seconds, default=10.0, help="seconds for the rounds of a race")
    add("--total", type=command.seconds, default=6 * 3600.0,
        help="seconds after which nothing new starts")  # fmt: skip
    add("--workdir", help="a new or empty folder for the results")
    if parser.parse_args(argv).quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args(argv)


def _check(flags: argparse.Namespace) -> None:
    if flags.features % flags.heads:
        raise RunError(
            f"--features must be a multiple of --heads, got {flags.features} and "
            f"{flags.heads}; choose another number of heads"
        )
    if flags.kv_heads and ("layer" in flags.parts or flags.heads % flags.kv_heads):
        raise RunError(
            f"--kv_heads must divide --heads, with --parts=core only, got {flags.kv_heads} of "
            f"{flags.heads} and --parts={','.join(flags.parts)}; change one of them"
        )
    shortest = min(flags.lengths or races.LENGTHS)
    if "packed" in flags.masks and shortest < flags.documents:
        raise RunError(
            f"--lengths must be at least --documents={flags.documents}, got {shortest}; choose "
            f"longer ones, or fewer documents"
        )
    known = dict.fromkeys(n for part in flags.parts for n in contestants.CONTESTANTS[part])
    if not known.keys() & set(flags.contestants or known):
        raise RunError(
            f"--contestants must name one that takes part in --parts={','.join(flags.parts)}, "
            f"got {','.join(flags.contestants)}; choose among {', '.join(known)}"
        )


def _introduce(found: dict[str, Any]) -> None:
    print(f"{found['device']}, {found['cpu']}, {found['cores']} cores")
    if found["load"] > 0.25 * found["cores"]:
        print(
            f"other programs use {found['load']:.1f} of {found['cores']} cores on average: "
            "expect slower and uneven times, most of all for torch"
        )


def _counts(text: str) -> tuple[int, ...]:
    return tuple(command.count(word) for word in text.split(","))


def _lengths(text: str) -> tuple[int, ...]:
    return () if text == "none" else _counts(text)


if __name__ == "__main__":
    main(sys.argv[1:])
