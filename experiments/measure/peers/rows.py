"""The rows of races, for results.json, and their tables."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments import tables
from experiments.measure.peers.cases import Case
from experiments.measure.peers.contestants import BASELINES
from experiments.measure.timing import Failure, Timing

COLUMNS = (
    "", "median", "quartiles", "rounds", "× baseline", "TFLOP/s", "peak memory", "compile", "",
)  # fmt: skip
Row = dict[str, Any]


def rows(
    case: Case, times: Mapping[str, Timing | Failure], weights: Mapping[str, Any]
) -> Iterator[Row]:
    """Yield one row for each contestant of a case, whatever its outcome.

    The times are of all contestants, and the results of `fresh.weigh` of some.
    """
    base = times.get(BASELINES[case.part])
    for name, time in times.items():
        row: Row = {
            "race": str(case), "contestant": name, "part": case.part, "passes": case.passes,
            "mask": case.mask, "dtype": case.dtype, "B": case.B, "T": case.T, "N": case.N,
            "K": case.K or case.N, "D": case.D, "window": case.window, "documents": case.documents,
            "status": "ok", "reason": None, "seconds": None, "ratio": None,
            "flops_per_second": None, "memory_bytes": None, "compile_seconds": None,
            "memory_reason": None,
        }  # fmt: skip
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
            _number(row["flops_per_second"], "{:.3g}", 1e-12),
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
