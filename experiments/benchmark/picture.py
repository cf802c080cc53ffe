"""Plot the time per token over length, with logarithmic axes and a line for each contestant."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from experiments import plots

Row = dict[str, Any]
STYLES = {
    "ours": ("black", "o"), "ours-blockwise": ("dimgray", "s"), "ours-reference": ("silver", "D"),
    "linen": ("tab:blue", "v"), "nnx": ("tab:cyan", "^"), "jax-xla": ("tab:purple", "P"),
    "jax-cudnn": ("tab:pink", "X"), "torch-sdpa": ("tab:red", "<"),
    "torch-mha": ("tab:orange", ">"), "equinox": ("tab:green", "h"), "haiku": ("tab:olive", "p"),
    "keras": ("tab:brown", "*"), "tokamax": ("gold", "d"),
}  # fmt: skip
OTHERS = (("navy", "x"), ("darkgreen", "+"), ("maroon", "1"))  # for kernels without a style


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Draw a column of panels for each pass and mask, and a row for each part and dtype.

    Times are divided by the tokens of the batch, which may differ between lengths.
    """
    timed = [row for row in rows if row["seconds"] and not row["extra"]]
    lines = list(dict.fromkeys((row["part"], row["dtype"]) for row in timed))
    columns = list(dict.fromkeys((row["passes"], row["mask"]) for row in timed))
    columns.sort(key=lambda column: column[0] == "backward")
    if not timed:
        return
    ticks = sorted({row["T"] for row in timed})
    size = (3.3 * len(columns) + 2.0, 3.1 * len(lines) + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(lines), len(columns), squeeze=False, sharex=True, sharey="row")
    for line, panels in zip(lines, grid, strict=True):
        here = [row for row in timed if (row["part"], row["dtype"]) == line]
        for column, axes in zip(columns, panels, strict=True):
            mine = [row for row in here if (row["passes"], row["mask"]) == column]
            _panel(axes, mine, ticks)
            axes.set_title(f"{column[0].replace('backward', 'forward + backward')}, {column[1]}")
        panels[0].set_ylabel(f"{line[0]}, {line[1]}\nµs a token")
        plots.widen(panels[0])  # The whole row shares it.
        handles = {
            label: handle
            for axes in panels
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        panels[-1].legend(
            handles.values(), handles.keys(), loc="center left", bbox_to_anchor=(1.02, 0.5),
            fontsize=9, frameon=False, title="median (band: quartiles)", title_fontsize=8,
        )  # fmt: skip
    for axes in grid[-1]:
        axes.set_xlabel("length T")
    plots.save(figure, path, 110)


def _panel(axes: Axes, rows: Sequence[Row], ticks: Sequence[int]) -> None:
    """Draw the lines of one pass and mask."""
    for order, name in enumerate(dict.fromkeys(row["label"] for row in rows)):
        mine = sorted((row for row in rows if row["label"] == name), key=lambda row: row["T"])
        color, marker = STYLES.get(name) or OTHERS[order % len(OTHERS)]
        lengths = [row["T"] for row in mine]
        low, median, high = (
            [1e6 * row["seconds"][q] / (row["B"] * row["T"]) for row in mine]
            for q in ("q1", "median", "q3")
        )
        if len(lengths) > 1:
            axes.fill_between(lengths, low, high, color=color, alpha=0.15, linewidth=0)
        else:
            axes.vlines(lengths, low, high, color=color, alpha=0.3, linewidth=3)
        axes.plot(
            lengths, median, label=name, color=color, marker=marker, markersize=4, linewidth=1.3,
            zorder=100 - order,  # ours on top
        )  # fmt: skip
    axes.set(xscale="log", yscale="log")
    if len(ticks) == 1:
        axes.set_xlim(ticks[0] / 2, ticks[0] * 2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels(
        [f"{T // 1024}k" if T >= 1024 and T % 1024 == 0 else str(T) for T in ticks]
    )
    axes.grid(alpha=0.3, which="both")
