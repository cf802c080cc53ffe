"""The folders of results."""

import datetime
import re
from pathlib import Path

from experiments.runs.failures import RunError


def new_folder(task: str) -> Path:
    """Return a folder under `runs/` that does not exist yet, by name and time."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    path, again = Path("runs", f"{task}-{stamp}").absolute(), 2
    while path.exists():
        path, again = path.with_name(f"{task}-{stamp}-{again}"), again + 1
    return path


def make(path: Path) -> None:
    """Make a folder for results, with its parents."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"--workdir must be a folder that can be made, got {path}: {error.strerror}; choose "
            f"another"
        ) from None


def local(workdir: str | Path, flag: str = "--workdir") -> Path:
    """Return the folder that a flag names, with ~ for a home."""
    if not str(workdir):
        raise RunError(f"{flag} must name a folder, got an empty name; leave it out for a new one")
    # A Path has single slashes already.
    if found := re.match(r"([A-Za-z][\w+.-]+):/", str(workdir)):
        raise RunError(
            f"{flag} must be a folder of a file system, and {found[1]}:// is none, got "
            f"{str(workdir)!r}; mount the bucket (gcsfuse, s3fs), and give its path"
        )
    try:
        return Path(workdir).expanduser().absolute()
    except RuntimeError:
        raise RunError(f"{flag} names the home of a user who is not here: {workdir}") from None


def result_folder(workdir: str | Path | None, name: str, flag: str = "--workdir") -> Path:
    """Make and return the folder for results that are written once: a new one, or an empty one."""
    path = new_folder(name) if workdir is None else local(workdir, flag)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RunError(f"{flag} must be a new or empty folder, and {path} is not; choose another")
    make(path)
    return path
