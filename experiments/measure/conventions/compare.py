"""Measure the conventions of the attention of installed packages, next to docs/conventions.md.

    python -m experiments.measure conventions
    python -m experiments.measure conventions --only=torch,keras

The tables of the page are the record. This measures the rows whose packages are installed, prints
the cells that have another value here, and says which packages are missing or have another version.
"""

import argparse
import importlib.metadata
import math
import re
from pathlib import Path

from experiments.measure import results
from experiments.measure.conventions import cells
from experiments.measure.conventions.libraries import LIBRARIES

PAGE = Path(__file__).parents[3] / "docs" / "conventions.md"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    names = "parts of rows' names, with commas between them (default: all that are installed)"
    parser.add_argument("--only", default="", metavar="NAMES", help=names)


def run(flags: argparse.Namespace) -> None:
    """Measure row by row."""
    record, versions = tables("library"), tables("package")
    rows = {n: x for n, x in LIBRARIES.items() if any(part in n for part in flags.only.split(","))}
    for package, installed in sorted({(x.package, x.installed) for x in rows.values()}):
        here = importlib.metadata.version(package) if installed else "not installed, so skipped"
        print(f"{package}: {here}. In the record: {versions[package]['version']}")
    rows = {name: x for name, x in rows.items() if x.installed}
    table = results.Table(flags.workdir, "conventions", "library", "column", "record", "here")
    for name, library in results.counted("measuring", rows):
        for column, here in cells.measure(library).items():
            then = record.get(name, {}).get(column, "")
            if not equal(then, here):
                row = {"library": name, "column": column, "record": then, "here": here}
                table.add(row, *row.values())
    print(f"{len(rows)} rows were measured, and {len(table.rows)} cells differ from the record")
    table.end()


def tables(first: str) -> dict[str, dict[str, str]]:
    """Return the cells of the page's tables with this first column, by row and column.

    Bold type and code marks are removed, and empty cells are left out.
    """
    found: dict[str, dict[str, str]] = {}
    head: list[str] = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            head = []
            continue
        row = [cell.strip().replace("**", "").replace("`", "") for cell in line.split("|")[1:-1]]
        if not head:
            head = row
        elif head[0] == first and not row[0].startswith("---"):
            columns = zip(head[1:], row[1:], strict=True)
            found.setdefault(row[0], {}).update({name: cell for name, cell in columns if cell})
    return found


def equal(then: str, here: str) -> bool:
    """Return True for equal cells. The initial values of a new layer are drawn from other seeds."""
    numbers = [re.match(r"\d\.\d+", cell) for cell in (then, here)]
    if all(numbers):
        return math.isclose(*(float(number[0]) for number in numbers if number), rel_tol=0.05)
    return then == here
