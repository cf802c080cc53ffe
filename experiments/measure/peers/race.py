"""Time attention next to other libraries, with its peak memory and compile time.

    python -m experiments.measure peers --quick
    python -m experiments.measure peers --parts=core --lengths=1024,4096 --contestants=ours,jax-xla
    python -m experiments.measure peers --parts=step --dtypes=float32

Contestants get the same values and run in turns, and their medians are compared. A library that is
not installed is skipped. "a second" counts operations of a layer or of attention; for a step, it
counts tokens, and the bytes that a step must read: the keys and values so far, and the parameters.
"""

import argparse
import functools
import itertools
import os
import sys

from experiments import command
from experiments.measure import machine, timing
from experiments.measure.peers import cases, contestants, fresh, torch_peers
from experiments.measure.peers.cases import Case
from experiments.measure.peers.contestants import BASELINES, CONTESTANTS
from experiments.measure.results import Table, counted
from experiments.runs.failures import RunError

FULL = {
    "lengths": (128, 256, 512, 1024, 2048, 4096, 8192, 16384), "masks": cases.MASKS,
    "dtypes": cases.DTYPES[:2], "memory": (128, 1024, 4096, 16384), "seconds": 10.0,
    "total": 6 * 3600.0, "contestants": contestants.NAMES,
}  # fmt: skip
QUICK = {
    "lengths": (128, 1024, 4096), "masks": ("causal",), "dtypes": ("float32",), "memory": (4096,),
    "seconds": 1.5, "total": 80.0, "contestants": ("ours", "linen", "jax-xla", "torch-sdpa"),
}  # fmt: skip
COLUMNS = "", "", "ms", "middle half", "× baseline", "a second", "memory", "compile", ""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add, among, count = parser.add_argument, command.among, command.count
    add("--quick", action="store_true", help="a few cases, within 2 minutes")
    add("--parts", type=among([*CONTESTANTS]), default=("layer", "core"),
        help="layer, core (only attention), step (of decoding); default: layer,core")  # fmt: skip
    add("--passes", type=among(cases.PASSES), default=cases.PASSES,
        help="forward, or backward (both passes together)")  # fmt: skip
    add("--masks", type=among(cases.MASKS), help="causal, full")
    add("--dtypes", type=among(cases.DTYPES), help="float32, bfloat16, float16")
    add("--contestants", type=among(contestants.NAMES), help=", ".join(contestants.NAMES))
    add("--lengths", type=_counts, help="sequence lengths such as 128,1024, or slots of caches")
    add("--batch", type=count, help="sequences in a batch")
    add("--tokens", type=count, help="tokens in a batch without --batch (default: 2,048)")
    add("--heads", type=count, default=8, help="attention heads (default: 8)")
    add("--features", type=count, default=512, help="model features (default: 512)")
    add("--window", type=count, default=0, help="the number of near tokens that a query sees")
    add("--memory", type=_lengths, help="lengths that also have memory and compile time, or none")
    add("--seconds", type=command.seconds, help="time for a race (default: 10)")
    add("--total", type=command.seconds, help="nothing new begins after this number of seconds")


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(command.count, text.split(",")))


def _lengths(text: str) -> tuple[int, ...]:
    return () if text == "none" else _counts(text)


def run(flags: argparse.Namespace) -> None:
    """Run race after race."""
    races = plan(flags)
    # Before JAX's backend starts: other libraries need memory of the same GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    facts = machine.describe()
    table = Table(flags.workdir, "peers", *COLUMNS, command=sys.argv, machine=facts)
    for title, (case, names) in counted("timing", races, flags.total):
        builds = {name: functools.partial(contestants.build, name, case) for name in names}
        rows = timing.race(builds, 200, flags.seconds, BASELINES[case.part])
        torch_peers.release()
        # A quick run has no time for more.
        weighs = (case.part, case.passes) == ("layer", "backward") if flags.quick else True
        for name, row in rows.items():
            if weighs and row["status"] == "ok" and case.T in flags.memory:
                row["fresh"] = fresh.weigh(name, case)
            weight = {"bytes": None, "compile": None, "reason": "", **row.get("fresh", {})}
            size, compiled = weight["bytes"], weight["compile"]
            table.add(
                {"race": title, "contestant": name, **vars(case), **row},
                title, name, *timing.cells(row),
                ", ".join(f"{rate:,.3g} {unit}" for unit, rate in row.get("rates", {}).items()),
                "" if size is None else f"{size / 2**20:,.0f} MiB",
                "" if compiled is None else f"{compiled:.2f} s", weight["reason"],
            )  # fmt: skip
    table.end()


def plan(flags: argparse.Namespace) -> dict[str, tuple[Case, list[str]]]:
    """Return the cases of the flags, short ones first, with the names of their contestants.

    Flags that were left out are filled in, as in a quick or a full run.
    """
    slots = flags.lengths or (2048,)
    for name, usual in (QUICK if flags.quick else FULL).items():
        if getattr(flags, name) is None:
            setattr(flags, name, usual)
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
            sorted(slots if steps else flags.lengths), flags.dtypes,
            ("causal",) if steps else flags.masks, ("forward",) if steps else flags.passes,
        ):  # fmt: skip
            usual = 8 if steps else max(1, min(8, 2048 // T))
            B = flags.batch or (max(1, flags.tokens // T) if flags.tokens else usual)
            sizes = flags.heads, flags.features, flags.window
            case = Case(part, passes, mask, B, T, dtype, *sizes)
            if names:
                races[str(case)] = case, names
    if not races:
        known = dict.fromkeys(name for part in flags.parts for name in CONTESTANTS[part])
        raise RunError(
            f"--contestants must name one that takes part in --parts={','.join(flags.parts)}, "
            f"got {','.join(flags.contestants)}; choose among {', '.join(known)}"
        )
    return dict(sorted(races.items(), key=lambda item: item[1][0].T))
