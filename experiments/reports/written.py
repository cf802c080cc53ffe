"""The files that a run has written."""

import shlex
from pathlib import Path

from experiments.runs.record import FOLDER
from experiments.runs.rundir import METRICS

EVENTS, TRACE = "tensorboard", "profile"


def lines(folder: Path) -> list[str]:
    """Return lines with the files in a run's folder, and the command that shows its curves."""
    pictures = sorted(path.name for path in folder.glob("*.png"))
    names = [METRICS, *pictures, *(f"{name}/" for name in (FOLDER, EVENTS, TRACE))]
    there = [name for name in names if (folder / name).exists()]
    said = [f"written to {folder}: {', '.join(there)}"]
    if (folder / EVENTS).exists():
        said.append(f"its curves, live: tensorboard --logdir={shlex.quote(str(folder / EVENTS))}")
    return said
