"""Tables in Markdown, and the files of a measurement."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.common import outputs


def head(*names: str) -> str:
    """Return the two lines on top of a table."""
    return f"{line(*names)}\n{'|---' * len(names)}|"


def line(*cells: object) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def write(folder: Path, table: str, results: Mapping[str, Any]) -> str:
    """Write table.md and results.json, each whole at any time, and return where they are."""
    for name, text in (("table.md", table), ("results.json", json.dumps(results, indent=1))):
        outputs.write(folder / name, f"{text}\n")
    return f"table.md and results.json are in {folder}"


def duration(seconds: float | None) -> str:
    """Format seconds with three digits and a unit."""
    if seconds is None:
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1e3 else f"{seconds:.0f} s"
    return f"{seconds * 1e6:.3g} µs"


def clock(seconds: float) -> str:
    """Return seconds as people say them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
