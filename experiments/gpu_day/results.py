"""The steps' results as Markdown tables, and the consequences of the kernels' times for `auto`."""

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.benchmark import report
from flax_mha.kernels import choose
from flax_mha.kernels.chips import gpus

ROOT = Path(__file__).parent.parent.parent
# The files that state the minimum length for blockwise on GPUs, with the forms of the number.
LIMITS = {"flax_mha/kernels/choose.py": ("{}**2", "{:,}²"), "docs/kernels.md": ("{:,}²",)}
LIMIT = 2048
Row = Mapping[str, Any]


def benchmark_rows(folder: Path, said: str) -> list[Row]:
    """Return the rows that `experiments.benchmark` has measured so far."""
    del said
    rows: list[Row] = json.loads((folder / "results" / "results.json").read_text())["rows"]
    return rows


def limit(rows: Sequence[Row]) -> int | None:
    """Return the greatest measured T below the first at which `blockwise` is faster in float32.

    The ratio is the geometric mean over masks and passes. The result is 0 if `reference` never is
    faster, None if they were not measured. Only time counts: `choose.MOST_SCORES` limits memory.
    """
    ratios: dict[int, list[float]] = {}
    for case in _cases(row for row in rows if row["dtype"] == "float32"):
        one, other = (case.get(f"ours-{name}") for name in ("reference", "blockwise"))
        if one and other and one["status"] == other["status"] == "ok":
            log = math.log(one["seconds"]["median"] / other["seconds"]["median"])
            ratios.setdefault(one["T"], []).append(log)
    found = 0 if ratios else None
    for T in sorted(ratios):
        if sum(ratios[T]) > 0:
            break
        found = T
    return found


def proposal(rows: Sequence[Row]) -> str:
    """Return a diff that sets the measured limit, or "" if nothing changes."""
    measured = limit(rows)
    if not measured or measured == LIMIT:
        return ""
    found = ""
    for name, forms in LIMITS.items():
        old = new = (ROOT / name).read_text()
        for form in forms:
            new = new.replace(form.format(LIMIT), form.format(measured))
        found += _diff(name, old, new)
    return found


def flex_proposal(device: str, tests: Mapping[str, Any] | None) -> str:
    """Return a diff by which `auto` takes flex on this GPU, or "" unless all its tests passed."""
    if not tests or tests["failed"] or not tests["passed"]:
        return ""
    capability = gpus.capability(device)
    if isinstance(capability, str) or capability in choose.FLEX_GPUS:
        return ""
    listed = ", ".join(map(str, sorted({*choose.FLEX_GPUS, capability})))
    name = "flax_mha/kernels/choose.py"
    old = (ROOT / name).read_text()
    line = r"(FLEX_GPUS: .*) = frozenset\(.*\)"
    return _diff(name, old, re.sub(line, rf"\1 = frozenset([{listed}])", old))


def _diff(name: str, old: str, new: str) -> str:
    before, after = (text.splitlines(keepends=True) for text in (old, new))
    return "".join(difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", n=1))


def slower_cudnn(rows: Sequence[Row]) -> list[str]:
    """Return cases that `auto` gives to cuDNN although plain einsums were faster."""
    found = []
    for case in _cases(rows):
        one, other = (case.get(f"ours-{name}") for name in ("cudnn", "reference"))
        if one and other and one["status"] == other["status"] == "ok":
            ratio = one["seconds"]["median"] / other["seconds"]["median"]
            if ratio > 1:
                found.append(f"{one['race']}: cudnn takes {ratio:.2f} times as long as reference")
    return found


def core_table(rows: Sequence[Row]) -> str:
    """Return a table in milliseconds, a line per case, a column per contestant that ran."""
    names = [
        name for name in dict.fromkeys(row["label"] for row in rows)
        if any(row["label"] == name and row["status"] == "ok" for row in rows)
    ]  # fmt: skip
    lines = ["| pass | mask | dtype | T (B) | N/K | " + " | ".join(names) + " | best peer/ours |",
             "|---" * (len(names) + 6) + "|"]  # fmt: skip
    for case in _cases(rows):
        first = next(iter(case.values()))
        times = {name: row["seconds"]["median"] for name, row in case.items() if row["seconds"]}
        peers = [time for name, time in times.items() if not name.startswith("ours")]
        ratio = f"{min(peers) / times['ours']:.2f}" if peers and "ours" in times else ""
        cells = [f"{1e3 * times[name]:.3g}" if name in times else "" for name in names]
        lines.append(
            "| {passes} | {mask} | {dtype} | {T:,} ({B}) | {N}/{K} | ".format(**first)
            + " | ".join([*cells, ratio]) + " |"
        )  # fmt: skip
    return "\n".join(lines)


def decode_table(rows: Sequence[Row]) -> str:
    """Return a table with a line for each contestant that ran at a size."""
    lines = ["| B | S | | one step | tokens/s | of bandwidth |", "|---" * 6 + "|"]
    for row in rows:
        if row["seconds"]:
            share = row["bytes_per_second"] / row["bandwidth"]
            step = report.duration(row["seconds"]["median"])
            lines.append(
                f"| {row['B']} | {row['S']:,} | {row['label']} | {step} | "
                f"{row['tokens_per_second']:,.0f} | {share:.0%} |"
            )
    return "\n".join(lines)


def _cases(rows: Any) -> list[dict[str, Row]]:
    """Return the rows of each race, by label."""
    races: dict[str, dict[str, Row]] = {}
    for row in rows:
        races.setdefault(row["race"], {})[row["label"]] = row
    return list(races.values())
