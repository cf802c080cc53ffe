"""What every measurement shows: a table that grows row by row, the files, progress, pictures."""

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.common import outputs, tables
from experiments.common.phases import phase


class Table:
    """A table in Markdown. Each row is printed and saved as soon as it is known.

    Args:
      workdir: the folder for table.md and results.json; None for a new one under runs/.
      name: the name of the measurement, for a new folder.
      columns: the heads of the columns.
      **facts: what results.json says besides the rows.
    """

    def __init__(self, workdir: str | None, name: str, *columns: str, **facts: Any) -> None:
        self.folder = outputs.result_folder(workdir, name)
        self.rows = list[dict[str, Any]]()
        self._facts, self._lines = facts, [tables.head(*columns)]
        print(self._lines[0], flush=True)

    def add(self, row: dict[str, Any], *cells: object) -> None:
        """Add a row: its record in results.json, and its cells."""
        self.rows.append(row)
        self._lines.append(tables.line(*cells))
        print(self._lines[-1], flush=True)
        self._write()

    def _write(self) -> None:
        outputs.write(self.folder / "table.md", "\n".join(self._lines) + "\n")
        outputs.write_json(self.folder / "results.json", {**self._facts, "rows": self.rows})

    def end(self) -> None:
        """Print where the files are."""
        self._write()
        print(f"\ntable.md and results.json are in {self.folder}")


def counted(
    verb: str, items: Mapping[str, Any], seconds: float = math.inf
) -> Iterator[tuple[str, Any]]:
    """Yield items with their names. A progress line says which of how many is being measured.

    Args:
      verb: what is done to an item, such as "timing".
      items: the items, by name.
      seconds: nothing new begins after this time.
    """
    end = time.perf_counter() + seconds
    for n, (name, item) in enumerate(items.items(), 1):
        if time.perf_counter() > end:
            print(f"the time is over, so {len(items) - n + 1} of {len(items)} were left out")
            return
        with phase(f"{verb} {name}, {n} of {len(items)}"):
            yield name, item


def draw(
    path: Path, xlabel: str, panels: Mapping[str, Mapping[str, Any]], logs: str, **options: Any
) -> None:
    """Draw named lines (x, y) in panels, which have a title each.

    `logs` has a letter for each panel: "x" for two logarithmic axes, "y" for a vertical one, or
    "-". Options are those of `Figure.subplots`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    row = figure.subplots(1, len(panels), squeeze=False, **options)[0]
    for axes, (title, lines), log in zip(row, panels.items(), logs, strict=True):
        for name, points in lines.items():
            axes.plot(*points, marker="o" if log == "x" else "", markersize=3, label=name)
        axes.set(xlabel=xlabel, title=title, yscale="linear" if log == "-" else "log")
        if log == "x":
            axes.set_xscale("log", base=2)
    row[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
