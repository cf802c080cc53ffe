"""Measure the time and memory of attention beside its peers.

    python -m experiments.benchmark --quick
    python -m experiments.benchmark --parts=core --lengths=1024,4096 --contestants=ours,jax-xla
    python -m experiments.benchmark --parts=layer --dtypes=bfloat16 --workdir=runs/mine
    python -m experiments.benchmark --decode

Every race is interleaved: its contestants run in turns, and their medians are compared. Tables are
printed, and results.json and times.png go to --workdir (default: a new folder under runs/).
"""

import argparse
import dataclasses
import datetime
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Before jax starts: other libraries need memory of the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
from rich.console import Console

from experiments.benchmark import (
    cases,
    contestants,
    decoding,
    fresh,
    machine,
    picture,
    races,
    report,
    timing,
    torch_peers,
)
from experiments.phases import Phase
from experiments.runs import command, folders
from experiments.runs.failures import RunError

PROGRAM = "experiments.benchmark"
QUICK = {
    "lengths": races.CANONICAL, "masks": ("causal",), "dtypes": ("float32",),
    "memory": (4096,), "extras": False, "seconds": 1.5, "total": 80.0,
}  # fmt: skip
FULL = {"seconds": 10.0, "total": 6 * 3600.0, "repeats": 200}


def main(argv: Sequence[str]) -> None:
    """Run race after race, and report each as it ends."""
    flags = parse(argv)
    fields = {field.name for field in dataclasses.fields(races.Settings)}
    settings = races.Settings(**{key: flags[key] for key in fields & flags.keys()})
    _check(settings)
    folder = folders.result_folder(flags.get("workdir"), "benchmark")
    started, console = time.perf_counter(), report.console()
    end = started + flags["total"]
    header = _header()
    _introduce(console, header["machine"])
    if flags.get("decode"):
        decode(console, folder, header, flags)
        return
    rows: list[report.Row] = []
    for race in races.plan(settings):
        dtypes = {entry.case.dtype for entry in race.entries}
        header["ceilings"] |= machine.ceilings(sorted(dtypes), header["ceilings"])
        with Phase(f"timing {race.title}"):
            found = run(race, flags["repeats"], flags["seconds"], end)
        rows += found
        report.compare(rows, header["ceilings"])
        console.print(report.table(found, race.baseline))
        header["seconds"] = time.perf_counter() - started
        report.write(folder / "results.json", header, rows)
    console.print(report.ratios(rows))
    picture.draw(folder / "times.png", rows)
    console.print(f"{header['seconds']:.0f} s; results.json and times.png are in {folder}")


def decode(console: Console, folder: Path, header: dict[str, Any], flags: dict[str, Any]) -> None:
    """Time steps at each size, and a prompt at the first."""
    rows: list[report.Row] = []
    ran: list[decoding.Size] = []
    started = time.perf_counter()
    for size in decoding.sizes(machine.free_bytes(), flags):
        if time.perf_counter() - started > flags["total"]:
            break
        with Phase(f"timing steps of B={size.B}, S={size.S}"):
            try:
                bandwidth = decoding.bandwidth(size)
                here = decoding.race(size, flags["repeats"], flags["seconds"])
                # Other programs may have used the machine: the best counts.
                bandwidth = max(bandwidth, decoding.bandwidth(size))
            except Exception as error:  # a size that does not fit after all
                console.print(f"B={size.B}, S={size.S}: {timing.reason(error)}")
                continue
            finally:
                torch_peers.release()
        ran.append(size)
        rows += [row | {"bandwidth": bandwidth} for row in here]
        console.print(decoding.table(here, bandwidth))
        report.write(folder / "results.json", header, rows)
    if not ran or time.perf_counter() - started > flags["total"]:
        console.print("no time or no memory left for a prompt")
        return
    header["prefill"] = decoding.prefill(ran[0], flags["seconds"])
    text = (
        "a prompt of {tokens:,} tokens: {seconds:.3g} s in one call, {token_by_token:.3g} s token "
        "by token, {ratio:.1f} times as long; {linen:.3g} s with linen's steps"
    )
    console.print(text.format(**header["prefill"]))
    report.write(folder / "results.json", header, rows)
    console.print(f"results.json is in {folder}")


def run(race: races.Race, repeats: int, seconds: float, end: float) -> list[report.Row]:
    """Time a race, then measure memory and compile time of its entries one by one.

    Args:
      race: the race.
      repeats: the maximum number of rounds.
      seconds: the time for the rounds.
      end: the time after which nothing new starts.
    """
    works, skipped = {}, {}
    times: dict[str, timing.Timing | timing.Failure] = {}
    weights: dict[str, fresh.Weight | timing.Failure] = {}
    late = time.perf_counter() > end
    for label, name, case in race.entries:
        try:
            if late:
                raise contestants.RefusalError("no time left; raise --total")
            works[label] = contestants.build(name, case, machine.free_bytes())
        except contestants.RefusalError as refusal:
            skipped[label] = str(refusal)
        except Exception as error:  # a peer may raise anything
            times[label] = timing.Failure(timing.reason(error))
    queue = jax.default_backend() != "cpu"
    times |= timing.interleave(works, repeats, seconds, queue)
    works.clear()  # releases the memory
    torch_peers.release()
    for label, name, case in race.entries if race.weigh else ():
        if not isinstance(times.get(label), timing.Timing):
            continue
        left = end - time.perf_counter()
        weights[label] = (
            fresh.weigh(name, case, machine.free_bytes(), max(left, 5.0))
            if left > 0
            else timing.Failure("no time left; raise --total")
        )
    return report.rows(race, times, weights, skipped)


def parse(argv: Sequence[str]) -> dict[str, Any]:
    """Return the flags, with defaults of --quick or of a full run."""
    parser = command.Parser(__doc__, argument_default=argparse.SUPPRESS)
    add, among, count = parser.add_argument, command.among, command.count
    add("--quick", action="store_true", help="a few cases, within 2 minutes")
    add("--decode", action="store_true", help="decoding steps, instead of layer and core")
    add("--parts", type=among(cases.PARTS), help="the parts to time: layer, core")
    add("--passes", type=among(cases.PASSES), help="forward, or backward (both passes together)")
    add("--masks", type=among(cases.MASKS), help="causal, full, packed (causal with documents)")
    add("--dtypes", type=among(cases.DTYPES), help="float32, bfloat16, float16")
    add("--contestants", type=among(contestants.names()), help=", ".join(contestants.names()))
    add("--lengths", type=_counts, help="sequence lengths such as 128,1024, or cache slots")
    add("--batch", type=count, help="sequences per batch (default: from --tokens)")
    add("--tokens", type=count, help="tokens per batch (default: 2,048)")
    add("--documents", type=count, help="documents packed into a sequence (default: 8)")
    add("--kv_heads", type=count, help="key/value heads of cores (default: --heads)")
    add("--heads", type=count, help="attention heads (default: 8)")
    add("--features", type=count, help="model features (default: 512)")
    add("--window", type=count, help="the number of near tokens that a query sees")
    add("--memory", type=_lengths, help="lengths for memory and compile time, or none")
    extra = argparse.BooleanOptionalAction
    add("--extras", action=extra, help="extra races: a window, bfloat16, long T")
    add("--repeats", type=count, help="the maximum number of rounds of a race")
    add("--seconds", type=command.seconds, help="seconds for the rounds of a race")
    add("--total", type=command.seconds, help="seconds after which nothing new starts")
    add("--workdir", help="a new or empty folder for the results")
    said = vars(parser.parse_args(argv))
    return FULL | (QUICK if said.get("quick") else {}) | said


def _check(settings: races.Settings) -> None:
    if settings.features % settings.heads:
        raise RunError(
            f"--features must be a multiple of --heads, got {settings.features} and "
            f"{settings.heads}; choose another number of heads"
        )
    if settings.kv_heads and ("layer" in settings.parts or settings.heads % settings.kv_heads):
        raise RunError(
            f"--kv_heads must divide --heads, with --parts=core only, got {settings.kv_heads} of "
            f"{settings.heads} and --parts={','.join(settings.parts)}; change one of them"
        )
    if "packed" in settings.masks and min(settings.lengths) < settings.documents:
        raise RunError(
            f"--lengths must be at least --documents={settings.documents}, got "
            f"{min(settings.lengths)}; choose longer ones, or fewer documents"
        )
    known = dict.fromkeys(n for part in settings.parts for n in contestants.CONTESTANTS[part])
    if not known.keys() & set(settings.contestants or known):
        raise RunError(
            f"--contestants must name one that takes part in --parts={','.join(settings.parts)}, "
            f"got {','.join(settings.contestants or ())}; choose among {', '.join(known)}"
        )


def _header() -> dict[str, Any]:
    return {
        "program": PROGRAM,
        "command": sys.argv,
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "ceilings": {},
    }


def _introduce(console: Console, found: dict[str, Any]) -> None:
    console.print(f"{found['device']}, {found['cpu']}, {found['cores']} cores", style="dim")
    if found["load"] > 0.25 * found["cores"]:
        console.print(
            f"other programs use {found['load']:.1f} of {found['cores']} cores on average: "
            "expect slower and uneven times, most of all for torch",
            style="bold",
        )


def _counts(text: str) -> tuple[int, ...]:
    return tuple(command.count(word) for word in text.split(","))


def _lengths(text: str) -> tuple[int, ...]:
    return () if text == "none" else _counts(text)


if __name__ == "__main__":
    main(sys.argv[1:])
