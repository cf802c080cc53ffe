"""The figures of studies: lines with bands and bars, and their numbers as text."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


def make_panels(
    labels: dict[str, tuple[str, str]], width: float = 4.0, height: float = 3.2
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a row of panels, whose x and y labels come by title."""
    figure = Figure(figsize=(width * len(labels), height), layout="constrained")
    panels = list(figure.subplots(1, len(labels), squeeze=False)[0])
    for axes, (title, (x, y)) in zip(panels, labels.items(), strict=True):
        axes.set(xlabel=x, ylabel=y)
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.xaxis.get_major_locator().set_params(integer=True)
    return figure, panels


def draw_band(axes: Axes, x: Any, y: Any, label: str, color: str, style: str = "-") -> None:
    """Draw the median over seeds of y [points, seeds] as a line, in a band from least to most."""
    axes.plot(x, np.median(y, -1), style, color=color, label=label, linewidth=1.6)
    axes.fill_between(x, np.min(y, -1), np.max(y, -1), color=color, alpha=0.2, linewidth=0)


def draw_bars(axes: Axes, x: Any, y: Any, label: str, color: str) -> None:
    """Draw the median over seeds of y [seeds, bars], with a line from least to most."""
    middle = np.median(y, 0)
    error = middle - np.min(y, 0), np.max(y, 0) - middle
    axes.bar(x, middle, yerr=error, color=color, label=label, capsize=2)


def save(figure: Figure, path: Path) -> None:
    """Write the figure with its legends, and print its path."""
    for axes in figure.axes:
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    print(f"figure: {path}")


def spread(values: Any) -> str:
    """Return the median of seeds with the least and the most, as text."""
    return f"{np.median(values):.3f} ({np.min(values):.3f} to {np.max(values):.3f})"
