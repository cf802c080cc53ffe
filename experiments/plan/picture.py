"""Layouts side by side: the memory of a chip, and the time of each of its resources."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import plots

Row = dict[str, Any]
HELD = {
    "parameters": "tab:blue", "optimizer": "tab:cyan", "batch": "tab:gray",
    "activations": "tab:orange",
}  # fmt: skip
SPENT = {"compute": "tab:green", "memory": "tab:purple", "network": "tab:red"}


def draw(path: Path, rows: Sequence[Row], title: str) -> None:
    """Draw a stacked bar of memory for each layout, and its three times if known.

    Args:
      path: the PNG file.
      rows: rows as in the JSON, see `report.row`; compiled ones are drawn.
      title: the picture's title.
    """
    rows = [row for row in rows if "bytes" in row][::-1]  # the first on top
    if not rows:
        return
    names = [
        " ".join(f"{axis} {n}" for axis, n in row["mesh"].items() if n > 1) or "one device"
        for row in rows
    ]
    timed = all(row["seconds"] for row in rows)
    figure = Figure(figsize=(11 if timed else 8, 2.0 + 0.5 * len(rows)), layout="constrained")
    figure.suptitle(title, parse_math=False)
    left, *others = figure.subplots(1, 1 + timed, sharey=True, squeeze=False)[0]
    at = np.arange(len(rows))
    start = np.zeros(len(rows))
    chip, most = rows[0]["bytes"]["chip"], max(row["bytes"]["peak"] for row in rows)
    unit, size = ("GiB", 2**30) if most > 2**28 else ("MiB", 2**20)
    for kind, color in HELD.items():
        sizes = np.array([row["bytes"][kind] for row in rows]) / size
        left.barh(at, sizes, left=start, color=color, label=kind)
        start += sizes
    label = f"{unit} on one device"
    if chip and most > chip / 50:
        left.axvline(chip / size, color="black", linestyle="--", label="memory of a chip")
    elif chip:  # The line would make the bars invisible.
        label += f" (a chip has {chip / 2**30:.3g} GiB)"
    left.set(xlabel=label, yticks=at, yticklabels=names)
    for right in others:
        for i, (kind, color) in enumerate(SPENT.items()):
            seconds = [1e3 * row["seconds"][kind] for row in rows]
            right.barh(at + 0.27 * (1 - i), seconds, height=0.25, color=color, label=kind)
        right.set(xlabel="least time of a step, ms")
    for axes in (left, *others):
        axes.grid(alpha=0.3, axis="x")
        axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5)
    plots.save(figure, path, 110)
