"""Time attention beside other libraries, with its peak memory and compile time.

    python -m experiments.measure peers --quick
    python -m experiments.measure peers --parts=core --lengths=1024,4096 --contestants=ours,jax-xla
    python -m experiments.measure peers --parts=layer --dtypes=bfloat16 --workdir=runs/mine

Contestants get the same values and run in turns, and their medians are compared. Tables are
printed, and table.md and results.json go to --workdir (default: a new folder under runs/).
"""

import argparse
import datetime
import functools
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments import tables
from experiments.measure import machine, timing
from experiments.measure.peers import cases, contestants, fresh, rows, torch_peers
from experiments.measure.peers.cases import Case
from experiments.measure.peers.contestants import CONTESTANTS
from experiments.measure.timing import Failure, Timing
from experiments.phases import Phase
from experiments.runs import command, folders
from experiments.runs.failures import RunError

FULL = {
    "lengths": (128, 256, 512, 1024, 2048, 4096, 8192, 16384), "masks": cases.MASKS[:2],
    "dtypes": cases.DTYPES[:2], "memory": (128, 1024, 4096, 16384), "seconds": 10.0,
    "total": 6 * 3600.0,
}  # fmt: skip
QUICK = {
    "lengths": (128, 1024, 4096), "masks": ("causal",), "dtypes": ("float32",), "memory": (4096,),
    "seconds": 1.5, "total": 80.0,
}  # fmt: skip
QUICK_NAMES = {"layer": ("ours", "linen", "torch-sdpa"), "core": ("ours", "jax-xla", "torch-sdpa")}
QUICK_MEMORY = ("layer", "backward")
LATE = Failure("no time left; raise --total", "skipped")


class Race(NamedTuple):
    """Contestants of a case, and True if memory and compile time are measured too."""

    case: Case
    contestants: tuple[str, ...]
    weighs: bool


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `decoding` shares."""
    add, count = parser.add_argument, command.count
    add("--lengths", type=_counts, help="sequence lengths such as 128,1024, or slots of caches")
    add("--batch", type=count, help="sequences a batch")
    add("--heads", type=count, default=8, help="attention heads (default: 8)")
    add("--features", type=count, default=512, help="model features (default: 512)")
    add("--repeats", type=count, default=200, help="the maximum number of rounds of a race")
    add("--seconds", type=command.seconds, help="of a race (default: 10)")
    add("--total", type=command.seconds, help="seconds after which nothing new starts")
    add("--workdir", metavar="FOLDER", help="a new or empty folder for the results")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    among, count = command.among, command.count
    add_sizes(parser)
    add = parser.add_argument
    add("--quick", action="store_true", help="a few cases, within 2 minutes")
    add("--parts", type=among(cases.PARTS), default=cases.PARTS, help="the parts: layer, core")
    add("--passes", type=among(cases.PASSES), default=cases.PASSES,
        help="forward, or backward (both passes together)")  # fmt: skip
    add("--masks", type=among(cases.MASKS), help="causal, full, packed (causal with documents)")
    add("--dtypes", type=among(cases.DTYPES), help="float32, bfloat16, float16")
    names = contestants.names()
    add("--contestants", type=among(names), help=", ".join(names))
    add("--tokens", type=count, help="tokens a batch without --batch (default: 2,048)")
    add("--documents", type=count, default=8, help="documents packed into a sequence (default: 8)")
    add("--kv_heads", type=count, default=0, help="key/value heads of cores (default: --heads)")
    add("--window", type=count, default=0, help="the number of near tokens that a query sees")
    add("--memory", type=_lengths, help="lengths for memory and compile time, or none")


def run(flags: argparse.Namespace) -> None:
    """Run race after race, and report each as it ends."""
    flags = filled(flags)
    _check(flags)
    folder = folders.result_folder(flags.workdir, "peers")
    started = time.perf_counter()
    found: list[rows.Row] = []
    texts: list[str] = []
    header = introduce()
    for race in plan(flags):
        with Phase(f"timing {race.case}"):
            here = measure(race, flags.repeats, flags.seconds, started + flags.total)
        found += here
        texts.append(rows.table(here))
        print(f"{texts[-1]}\n", flush=True)
        header["seconds"] = time.perf_counter() - started
        table = "\n\n".join([*texts, rows.ratios(found)])
        place = tables.write(folder, table, {**header, "rows": found})
    print(f"{rows.ratios(found)}\n{header['seconds']:.0f} s; {place}")


def filled(flags: argparse.Namespace) -> argparse.Namespace:
    """Return the flags, those left out as in a quick or a full run."""
    usual = QUICK if flags.quick else FULL
    given = {name: value for name, value in vars(flags).items() if value is not None}
    return argparse.Namespace(**{**vars(flags), **usual, **given})


def introduce() -> dict[str, Any]:
    """Print the machine, and return the head of the results."""
    # Before JAX's backend starts: other libraries need memory of the same GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    found = machine.describe()
    print(f"{found['device']}, {found['cpu']}, {found['cores']} cores")
    if found["load"] > 0.25 * found["cores"]:
        print(
            f"other programs use {found['load']:.1f} of {found['cores']} cores on average: "
            "expect slower and uneven times, most of all for torch"
        )
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    return {"command": sys.argv, "started": now, "machine": found}


def plan(flags: argparse.Namespace) -> list[Race]:
    """Return the races of the command's flags, short ones first."""
    return [
        Race(
            Case(
                part, passes == "backward", mask != "full",
                flags.batch or cases.batch_for(T, flags.tokens), T, dtype,
                flags.heads, flags.features, flags.window,
                flags.documents if mask == "packed" else 0, flags.kv_heads,
            ),
            names,
            T in flags.memory and not (flags.quick and (part, passes) != QUICK_MEMORY),
        )
        for T in sorted(flags.lengths)
        for part in flags.parts
        for dtype in flags.dtypes
        for mask in flags.masks
        for passes in flags.passes
        if (names := _names(flags, part)) and not (flags.quick and part == "core" and T < 1024)
    ]  # fmt: skip


def _names(flags: argparse.Namespace, part: str) -> tuple[str, ...]:
    chosen = flags.contestants or (QUICK_NAMES[part] if flags.quick else CONTESTANTS[part])
    return tuple(name for name in CONTESTANTS[part] if name in chosen)


def measure(race: Race, repeats: int, seconds: float, end: float) -> list[rows.Row]:
    """Time a race, then measure memory and compile time of its contestants one by one.

    The rounds, at most `repeats`, take some seconds. After the time `end` nothing new starts.
    """
    late = time.perf_counter() > end
    works = {name: LATE if late else attempt(name, race.case) for name in race.contestants}
    times: Mapping[str, Timing | Failure] = timing.interleave(works, repeats, seconds)
    works.clear()  # releases the memory
    torch_peers.release()
    weights: dict[str, fresh.Weight | Failure] = {}
    for name in race.contestants if race.weighs else ():
        if isinstance(times[name], Timing):
            left = end - time.perf_counter()
            free = machine.free_bytes()
            weights[name] = fresh.weigh(name, race.case, free, max(left, 5.0)) if left > 0 else LATE
    return list(rows.rows(race.case, {name: times[name] for name in race.contestants}, weights))


def attempt(name: str, case: Case) -> Any:
    """Return the work of a contestant, or a Failure."""
    return timing.attempt(functools.partial(contestants.build, name, case, machine.free_bytes()))


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
    if "packed" in flags.masks and min(flags.lengths) < flags.documents:
        raise RunError(
            f"--lengths must be at least --documents={flags.documents}, got {min(flags.lengths)}; "
            f"choose longer ones, or fewer documents"
        )
    known = dict.fromkeys(n for part in flags.parts for n in CONTESTANTS[part])
    if not known.keys() & set(flags.contestants or known):
        raise RunError(
            f"--contestants must name one that takes part in --parts={','.join(flags.parts)}, "
            f"got {','.join(flags.contestants)}; choose among {', '.join(known)}"
        )


def _counts(text: str) -> tuple[int, ...]:
    return tuple(command.count(word) for word in text.split(","))


def _lengths(text: str) -> tuple[int, ...]:
    return () if text == "none" else _counts(text)
