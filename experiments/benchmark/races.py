"""The races: contestants of a case that run in turns, their measurements, and the tables."""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from experiments import tables
from experiments.benchmark import cases, contestants, fresh, torch_peers
from experiments.benchmark.cases import Case
from experiments.benchmark.contestants import BASELINES, CONTESTANTS
from experiments.measure import machine, timing
from experiments.measure.timing import Failure, Timing

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
QUICK = {"layer": ("ours", "linen", "torch-sdpa"), "core": ("ours", "jax-xla", "torch-sdpa")}
QUICK_MEMORY = ("layer", "backward")
LATE = Failure("no time left; raise --total", "skipped")
COLUMNS = (
    "", "median", "quartiles", "rounds", "× baseline", "TFLOP/s", "of matmul", "peak memory",
    "compile", "",
)  # fmt: skip
Row = dict[str, Any]


class Race(NamedTuple):
    """Contestants of a case, and True if memory and compile time are measured too."""

    case: Case
    contestants: tuple[str, ...]
    weighs: bool


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
        for T in sorted(flags.lengths or LENGTHS)
        for part in flags.parts
        for dtype in flags.dtypes or cases.DTYPES[:2]
        for mask in flags.masks
        for passes in flags.passes
        if (names := _names(flags, part)) and not (flags.quick and part == "core" and T < 1024)
    ]  # fmt: skip


def _names(flags: argparse.Namespace, part: str) -> tuple[str, ...]:
    chosen = flags.contestants or (QUICK[part] if flags.quick else CONTESTANTS[part])
    return tuple(name for name in CONTESTANTS[part] if name in chosen)


def run(race: Race, repeats: int, seconds: float, end: float) -> list[Row]:
    """Time a race, then measure memory and compile time of its contestants one by one.

    The rounds, at most `repeats`, take some seconds. After the time `end` nothing new starts.
    """
    late = time.perf_counter() > end
    built = {name: LATE if late else attempt(name, race.case) for name in race.contestants}
    works = {name: work for name, work in built.items() if not isinstance(work, Failure)}
    times: dict[str, Timing | Failure] = {
        name: failure for name, failure in built.items() if isinstance(failure, Failure)
    }
    del built
    times |= timing.interleave(works, repeats, seconds, jax.default_backend() != "cpu")
    works.clear()  # releases the memory
    torch_peers.release()
    weights: dict[str, fresh.Weight | Failure] = {}
    for name in race.contestants if race.weighs else ():
        if isinstance(times[name], Timing):
            left = end - time.perf_counter()
            free = machine.free_bytes()
            weights[name] = fresh.weigh(name, race.case, free, max(left, 5.0)) if left > 0 else LATE
    return list(rows(race, times, weights))


def attempt(name: str, case: Case) -> Any:
    """Return the work of a contestant, or a Failure."""
    try:
        return contestants.build(name, case, machine.free_bytes())
    except contestants.RefusalError as refusal:
        return Failure(str(refusal), "skipped")
    except Exception as error:  # a peer may raise anything
        return Failure(timing.reason(error))


def rows(
    race: Race, times: Mapping[str, Timing | Failure], weights: Mapping[str, Any]
) -> Iterator[Row]:
    """Yield one row for each contestant of a race, whatever its outcome.

    The times are of all contestants, and the results of `fresh.weigh` of some.
    """
    case, base = race.case, times.get(BASELINES[race.case.part])
    for name in race.contestants:
        row: Row = {
            "race": str(case), "contestant": name, "part": case.part, "passes": case.passes,
            "mask": case.mask, "dtype": case.dtype, "B": case.B, "T": case.T, "N": case.N,
            "K": case.K or case.N, "D": case.D, "window": case.window, "documents": case.documents,
            "status": "ok", "reason": None, "seconds": None, "ratio": None,
            "flops_per_second": None, "of_ceiling": None, "memory_bytes": None,
            "compile_seconds": None, "memory_reason": None,
        }  # fmt: skip
        time = times[name]
        if isinstance(time, Failure):
            row |= {"status": time.status, "reason": time.reason}
        else:
            row |= {"seconds": time._asdict(), "flops_per_second": case.flops() / time.median}
            if isinstance(base, Timing):
                row["ratio"] = base.median / time.median
        weight = weights.get(name)
        if isinstance(weight, Failure):
            row["memory_reason"] = weight.reason
        elif weight is not None:
            row |= {"memory_bytes": weight.bytes, "compile_seconds": weight.compile}
        yield row


def compare(found: Sequence[Row], ceilings: Mapping[str, float]) -> None:
    """Set the share of the ceiling, which a later matmul may have raised."""
    for row in found:
        if row["flops_per_second"] is not None and row["dtype"] in ceilings:
            row["of_ceiling"] = row["flops_per_second"] / ceilings[row["dtype"]]


def table(found: Sequence[Row]) -> str:
    """Return the table of one race in Markdown."""
    lines = [f"{found[0]['race']}\n", tables.head(*COLUMNS)]
    for row in found:
        time, notes = row["seconds"], []
        if row["status"] != "ok":
            notes.append(f"{row['status']}: {row['reason']}")
        if row["memory_reason"]:
            notes.append(f"memory: {row['memory_reason']}")
        lines.append(tables.line(
            row["contestant"], tables.duration(time and time["median"]),
            f"{tables.duration(time['q1'])} … {tables.duration(time['q3'])}" if time else "",
            time["rounds"] if time else "", _number(row["ratio"], "{:.2f}"),
            _number(row["flops_per_second"], "{:.3g}", 1e-12), _number(row["of_ceiling"], "{:.0%}"),
            _number(row["memory_bytes"], "{:,.0f} MiB", 2**-20),
            tables.duration(row["compile_seconds"]), "; ".join(notes),
        ))  # fmt: skip
    return "\n".join(lines)


def ratios(found: Sequence[Row]) -> str:
    """Return tables of speed relative to the baseline, a line per case, a column per name."""
    texts = []
    for part, baseline in BASELINES.items():
        lines: dict[tuple[Any, ...], dict[str, Row]] = {}
        for row in found:
            if row["part"] == part:
                key = (row["passes"], row["mask"], row["dtype"], row["T"], row["B"])
                lines.setdefault(key, {})[row["contestant"]] = row
        names = list(dict.fromkeys(name for case in lines.values() for name in case))
        if names:
            texts.append(f"{part}: times faster than {baseline}\n")
            texts.append(tables.head("pass", "mask", "dtype", "T", "B", *names))
        for key in sorted(lines, key=lambda key: (key[0] == "backward", *key[1:])):
            texts.append(tables.line(*key, *(_ratio(lines[key].get(name)) for name in names)))
        texts.append("")
    return "\n".join(texts)


def _number(x: float | None, form: str, scale: float = 1.0) -> str:
    return "" if x is None else form.format(x * scale)


def _ratio(row: Row | None) -> str:
    if row is None:
        return ""
    return row["status"] if row["status"] != "ok" else _number(row["ratio"], "{:.2f}") or "–"
