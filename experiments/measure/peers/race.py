"""Time attention next to other libraries, with its peak memory and compile time.

    python -m experiments.measure peers --quick
    python -m experiments.measure peers --parts=core --lengths=1024,4096 --contestants=ours,jax-xla
    python -m experiments.measure peers --parts=step --dtypes=float32

Contestants get the same values and run in turns, and their medians are compared. A library that is
not installed is skipped. Rows of steps also have the tokens a second. Only our contestants take a
window.
"""

import argparse
import functools
import itertools
import os
import sys

from experiments.common import command
from experiments.common.failures import RunError
from experiments.measure import machine, timing
from experiments.measure.peers import cases, contestants, fresh, torch_peers
from experiments.measure.peers.cases import Case
from experiments.measure.peers.contestants import BASELINES, CONTESTANTS
from experiments.measure.results import Table, counted

LENGTHS = 128, 256, 512, 1024, 2048, 4096, 8192, 16384
SLOTS = (2048,)  # of the caches of steps
QUICK = {
    "lengths": (128, 1024, 4096), "masks": ("causal",), "dtypes": ("float32",), "memory": (4096,),
    "seconds": 1.5, "contestants": ("ours", "linen", "jax-xla", "torch-sdpa"),
}  # fmt: skip
COLUMNS = "", "", "ms", "middle half", "× baseline", "tokens/s", "memory", "compile", ""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add, among, count = parser.add_argument, command.among, command.count
    add("--quick", action="store_true",
        help="a few cases within 2 minutes; overrides the other flags")  # fmt: skip
    add("--parts", type=among([*CONTESTANTS]), default=("layer", "core"),
        help="layer, core (only attention), step (of decoding); default: layer,core")  # fmt: skip
    add("--passes", type=among(cases.PASSES), default=cases.PASSES,
        help="forward, or backward (both passes together)")  # fmt: skip
    add("--masks", type=among(cases.MASKS), default=cases.MASKS, help="causal, full")
    add("--dtypes", type=among(cases.DTYPES), default=cases.DTYPES, help="float32, bfloat16")
    add("--contestants", type=among(contestants.NAMES), default=contestants.NAMES,
        metavar="NAME,…", help=", ".join(contestants.NAMES))  # fmt: skip
    add("--lengths", type=_counts, help="sequence lengths such as 128,1024, or slots of caches")
    add("--tokens", type=count, help="tokens in a batch (default: 2,048, in 8 sequences at most)")
    add("--heads", type=count, default=8, help="attention heads (default: 8)")
    add("--features", type=count, default=512, help="model features (default: 512)")
    add("--window", type=count, default=0, help="the number of near tokens that a query sees")
    add("--memory", type=_lengths, default=(128, 1024, 4096, 16384),
        help="lengths that also have memory and compile time, or none")  # fmt: skip
    add("--seconds", type=command.seconds, default=10.0, help="time for a race (default: 10)")


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(command.count, text.split(",")))


def _lengths(text: str) -> tuple[int, ...]:
    return () if text == "none" else _counts(text)


def run(flags: argparse.Namespace) -> None:
    """Run race after race."""
    if flags.quick:
        vars(flags).update(QUICK)
    races = plan(flags)
    # Before JAX's backend starts: other libraries need memory of the same GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    facts = machine.describe()
    table = Table(flags.workdir, "peers", *COLUMNS, command=sys.argv, machine=facts)
    for title, (case, names) in counted("timing", races, 80.0 if flags.quick else 6 * 3600.0):
        builds = {name: functools.partial(contestants.build, name, case) for name in names}
        rows = timing.race(builds, 200, flags.seconds, BASELINES[case.part])
        torch_peers.release()
        # A quick run has no time for more.
        weighs = not flags.quick or (case.part, case.passes) == ("layer", "backward")
        for name, row in rows.items():
            if weighs and row["status"] == "ok" and case.T in flags.memory:
                row["fresh"] = fresh.weigh(name, case)
            weight = row.get("fresh", {})
            table.add(
                {"race": title, "contestant": name, **vars(case), **row},
                title, name, *timing.cells(row),
                f"{row['tokens']:,.3g}" if row.get("tokens") else "",
                f"{weight['bytes'] / 2**20:,.0f} MiB" if "bytes" in weight else "",
                f"{weight['compile']:.2f} s" if weight.get("compile") else "",
                weight.get("reason", ""),
            )  # fmt: skip
    table.end()


def plan(flags: argparse.Namespace) -> dict[str, tuple[Case, list[str]]]:
    """Return the cases of the flags, short ones first, with the names of their contestants."""
    if flags.features % flags.heads:
        raise RunError(
            f"--features must be a multiple of --heads, got {flags.features} and "
            f"{flags.heads}; choose another number of heads"
        )
    races: dict[str, tuple[Case, list[str]]] = {}
    for part in flags.parts:
        steps = part == "step"
        names = [name for name in CONTESTANTS[part] if name in flags.contestants]
        for T, dtype, mask, passes in itertools.product(
            flags.lengths or (SLOTS if steps else LENGTHS), flags.dtypes,
            ("causal",) if steps else flags.masks, ("forward",) if steps else flags.passes,
        ):  # fmt: skip
            usual = 8 if steps else max(1, min(8, 2048 // T))
            B = max(1, flags.tokens // T) if flags.tokens else usual
            window = 0 if steps else flags.window
            case = Case(part, passes, mask, B, T, dtype, flags.heads, flags.features, window)
            if names:
                races[str(case)] = case, names
    if not races:
        raise RunError(
            f"--contestants must name one that takes part in --parts={','.join(flags.parts)}, "
            f"got {','.join(flags.contestants)}; choose another part"
        )
    return dict(sorted(races.items(), key=lambda item: item[1][0].T))
