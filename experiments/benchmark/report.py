"""The measurements as rows, tables and JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table

from experiments.benchmark.contestants import BASELINES
from experiments.benchmark.fresh import Weight
from experiments.benchmark.races import Race
from experiments.benchmark.timing import Failure, Timing

Row = dict[str, Any]


def rows(
    race: Race,
    times: Mapping[str, Timing | Failure],
    weights: Mapping[str, Weight | Failure],
    skipped: Mapping[str, str],
) -> list[Row]:
    """Return one row for each entry of a race, whatever its outcome.

    Args:
      race: the race.
      times: the times of tried entries, by label.
      weights: the measured memory of entries, by label.
      skipped: the reasons of skipped entries, by label.
    """
    base = times.get(race.baseline)
    found = []
    for label, contestant, case in race.entries:
        row: Row = {
            "race": race.title, "extra": race.extra, "label": label, "contestant": contestant,
            "part": case.part, "passes": case.passes, "mask": case.mask, "dtype": case.dtype,
            "B": case.B, "T": case.T, "N": case.N, "K": case.K or case.N, "D": case.D,
            "window": case.window, "documents": case.documents,
            "status": "skipped", "reason": skipped.get(label), "seconds": None, "ratio": None,
            "flops_per_second": None, "of_ceiling": None, "memory_bytes": None,
            "compile_seconds": None, "memory_reason": None,
        }  # fmt: skip
        time = times.get(label)
        if isinstance(time, Failure):
            row |= {"status": "failed", "reason": time.reason}
        elif time is not None:
            rate = case.flops() / time.median
            row |= {
                "status": "ok", "seconds": time._asdict(), "flops_per_second": rate,
                "ratio": base.median / time.median if isinstance(base, Timing) else None,
            }  # fmt: skip
        weight = weights.get(label)
        if isinstance(weight, Failure):
            row["memory_reason"] = weight.reason
        elif weight is not None:
            row |= {"memory_bytes": weight.bytes, "compile_seconds": weight.compile}
        found.append(row)
    return found


def compare(found: Sequence[Row], ceilings: Mapping[str, float]) -> None:
    """Set the share of the ceiling, which a later matmul may have raised."""
    for row in found:
        if row["flops_per_second"] is not None and row["dtype"] in ceilings:
            row["of_ceiling"] = row["flops_per_second"] / ceilings[row["dtype"]]


def table(found: Sequence[Row], baseline: str) -> Table:
    """Return the table of one race."""
    weighed = any(row["memory_bytes"] is not None or row["memory_reason"] for row in found)
    grid = Table(title=found[0]["race"], title_justify="left", title_style="bold", box=box.SIMPLE)
    grid.add_column("")
    for name in ("median", "quartiles", "rounds", f"× {baseline}", "TFLOP/s", "of matmul"):
        grid.add_column(name, justify="right", no_wrap=True)
    for name in ("peak memory", "compile") if weighed else ():
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("")
    for row in found:
        time, notes = row["seconds"], []
        if row["status"] != "ok":
            notes.append(f"{row['status']}: {row['reason']}")
        if row["memory_reason"] and row["memory_reason"] != row["reason"]:
            notes.append(f"memory: {row['memory_reason']}")
        cells = [
            duration(time and time["median"]),
            f"{duration(time['q1'])} … {duration(time['q3'])}" if time else "",
            str(time["rounds"]) if time else "",
            _number(row["ratio"], "{:.2f}"),
            _number(row["flops_per_second"], "{:.3g}", 1e-12),
            _number(row["of_ceiling"], "{:.0%}"),
        ]
        if weighed:
            cells.append(_number(row["memory_bytes"], "{:,.0f} MiB", 2**-20))
            cells.append(duration(row["compile_seconds"]))
        grid.add_row(row["label"], *cells, "; ".join(notes))
    return grid


def ratios(found: Sequence[Row]) -> Group:
    """Return tables of speed relative to the baseline, a line per case, a column per name."""
    grids = []
    for part, baseline in BASELINES.items():
        here = [row for row in found if row["part"] == part and not row["extra"]]
        names = list(dict.fromkeys(row["label"] for row in here))
        if not here:
            continue
        grid = Table(
            title=f"{part}: times faster than {baseline}",
            title_justify="left", title_style="bold", box=box.SIMPLE,
        )  # fmt: skip
        for name in ("", "", "", "T", "B", *names):
            grid.add_column(name, justify="right" if name else "left")
        lines: dict[tuple[Any, ...], dict[str, Row]] = {}
        for row in here:
            key = (row["passes"], row["mask"], row["dtype"], row["T"], row["B"])
            lines.setdefault(key, {})[row["label"]] = row
        for key in sorted(lines, key=lambda key: (key[0] == "backward", *key[1:])):
            cells = [_ratio(lines[key].get(name)) for name in names]
            grid.add_row(*map(str, key), *cells)
        grids.append(grid)
    return Group(*grids)


def write(path: Path, header: Mapping[str, Any], found: Sequence[Row]) -> None:
    """Write the whole run as JSON, so that an interrupted run leaves its results."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps({**header, "rows": list(found)}, indent=1) + "\n")
    draft.replace(path)


def console() -> Console:
    """Return a console wide enough for a table if the output is no terminal."""
    here = Console()
    return here if here.is_terminal else Console(width=150)


def duration(seconds: float | None) -> str:
    """Format seconds with three digits and a unit."""
    if seconds is None:
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1e3 else f"{seconds:.0f} s"
    return f"{seconds * 1e6:.3g} µs"


def _number(x: float | None, form: str, scale: float = 1.0) -> str:
    return "" if x is None else form.format(x * scale)


def _ratio(row: Row | None) -> str:
    if row is None:
        return ""
    return row["status"] if row["status"] != "ok" else _number(row["ratio"], "{:.2f}") or "–"
