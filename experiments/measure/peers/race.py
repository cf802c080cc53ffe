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
from collections.abc import Sequence
from typing import Any

from experiments.measure import machine, timing
from experiments.measure.peers import cases, contestants, fresh, torch_peers
from experiments.measure.peers.cases import Case
from experiments.measure.peers.contestants import BASELINES, CONTESTANTS
from experiments.measure.results import Table, counted, duration
from experiments.measure.timing import Timing
from experiments.runs import command
from experiments.runs.failures import RunError

FULL = {
    "lengths": (128, 256, 512, 1024, 2048, 4096, 8192, 16384), "masks": cases.MASKS,
    "dtypes": cases.DTYPES[:2], "memory": (128, 1024, 4096, 16384), "seconds": 10.0,
    "total": 6 * 3600.0, "contestants": contestants.NAMES,
}  # fmt: skip
QUICK = {
    "lengths": (128, 1024, 4096), "masks": ("causal",), "dtypes": ("float32",), "memory": (),
    "seconds": 1.5, "total": 80.0, "contestants": ("ours", "linen", "jax-xla", "torch-sdpa"),
}  # fmt: skip
COLUMNS = ("", "", "median", "quartiles", "× baseline", "a second", "memory", "compile", "")
Row = dict[str, Any]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add, among, count = parser.add_argument, command.among, command.count
    add("--quick", action="store_true", help="a few cases, within 2 minutes")
    add(
        "--parts",
        type=among([*CONTESTANTS]),
        default=("layer", "core"),
        help="layer, core (attention alone), step (a layer that decodes); default: layer,core",
    )
    add(
        "--passes",
        type=among(cases.PASSES),
        default=cases.PASSES,
        help="forward, or backward (both passes together)",
    )
    add("--masks", type=among(cases.MASKS), help="causal, full")
    add("--dtypes", type=among(cases.DTYPES), help="float32, bfloat16, float16")
    add("--contestants", type=among(contestants.NAMES), help=", ".join(contestants.NAMES))
    add("--lengths", type=_lengths, help="sequence lengths such as 128,1024, or slots of caches")
    add("--batch", type=count, help="sequences in a batch")
    add("--tokens", type=count, help="tokens in a batch without --batch (default: 2,048)")
    add("--heads", type=count, default=8, help="attention heads (default: 8)")
    add("--features", type=count, default=512, help="model features (default: 512)")
    add("--window", type=count, default=0, help="the number of near tokens that a query sees")
    add("--memory", type=_lengths, help="lengths that also have memory and compile time, or none")
    add("--seconds", type=command.seconds, help="time for a race (default: 10)")
    add("--total", type=command.seconds, help="nothing new begins after this number of seconds")


def _lengths(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(map(command.count, text.split(",")))


def run(flags: argparse.Namespace) -> None:
    """Run race after race."""
    races = plan(flags)
    # Before JAX's backend starts: other libraries need memory of the same GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    found = machine.describe()
    print(f"{found['device']}, {found['cpu']}, {found['cores']} cores")
    if found["load"] > 0.25 * found["cores"]:
        print(
            f"Other programs use {found['load']:.1f} of {found['cores']} cores on average. "
            "Expect slower and uneven times, most of all for torch."
        )
    table = Table(flags.workdir, "peers", *COLUMNS, command=sys.argv, machine=found)
    for _, (case, names) in counted("timing", races, flags.total):
        for row in measure(case, names, flags):
            table.add(row, *cells(row))
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


def measure(case: Case, names: Sequence[str], flags: argparse.Namespace) -> list[Row]:
    """Time a race, then measure memory and compile time of its contestants one by one."""
    works = {name: timing.attempt(functools.partial(contestants.build, name, case))
             for name in names}  # fmt: skip
    amounts = {name: getattr(work, "amounts", None) or {"TFLOP": case.flops() / 1e12}
               for name, work in works.items()}  # fmt: skip
    times: Any = timing.interleave(works, 200, flags.seconds)
    works.clear()  # releases the memory
    torch_peers.release()
    base, rows = times.get(BASELINES[case.part]), []
    for name, time in times.items():
        row: Row = {"race": str(case), "contestant": name, **vars(case), **time._asdict()}
        if isinstance(time, Timing):
            row |= {"status": "ok", "rates": {u: x / time.median for u, x in amounts[name].items()}}
            row["ratio"] = base.median / time.median if isinstance(base, Timing) else None
            if case.T in flags.memory and case.part != "step":
                row["fresh"] = fresh.weigh(name, case)._asdict()
        rows.append(row)
    return rows


def cells(row: Row) -> list[str]:
    """Return the cells of a row."""
    if row["status"] != "ok":
        return [row["race"], row["contestant"], *[""] * 6, f"{row['status']}: {row['reason']}"]
    weight = row.get("fresh", {})
    size, compiled = weight.get("bytes"), weight.get("compile")
    return [
        row["race"], row["contestant"], duration(row["median"]),
        f"{duration(row['q1'])} … {duration(row['q3'])}",
        f"{row['ratio']:.2f}" if row["ratio"] else "",
        ", ".join(f"{rate:,.3g} {unit}" for unit, rate in row["rates"].items()),
        "" if size is None else f"{size / 2**20:,.0f} MiB",
        "" if compiled is None else duration(compiled), weight.get("reason", ""),
    ]  # fmt: skip
