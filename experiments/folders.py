"""Where results go."""

import datetime
from pathlib import Path

from experiments.failures import RunError


def new_folder(task: str) -> Path:
    """A folder under `runs/` that does not exist yet, by name and time."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    path, again = Path("runs", f"{task}-{stamp}").absolute(), 2
    while path.exists():
        path, again = path.with_name(f"{task}-{stamp}-{again}"), again + 1
    return path


def result_folder(workdir: str | Path | None, name: str, flag: str = "--workdir") -> Path:
    """The folder for results that are written once: the given one, new or empty, or a new one.

    Raises:
      RunError: if there is something in it.
    """
    if workdir is None:
        return new_folder(name)
    path = Path(workdir).absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RunError(f"{flag} must be a new or empty folder, and {path} is not; choose another")
    return path
