"""Folders and files of results."""

import datetime
import json
import os
from pathlib import Path
from typing import Any

from experiments.common.failures import RunError


def new_folder(name: str) -> Path:
    """Return a folder under `runs/` that does not exist yet, by name and time."""
    path = Path("runs", f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}").absolute()
    return path if not path.exists() else path.with_name(f"{path.name}-{os.getpid()}")


def local(workdir: str | Path, flag: str = "--workdir") -> Path:
    """Return the folder that a flag names, with ~ for a home."""
    if not str(workdir) or "://" in str(workdir):
        raise RunError(
            f"{flag} must be a folder of a file system, got {str(workdir)!r}; mount a bucket "
            f"(gcsfuse, s3fs), and give its path"
        )
    path = Path(workdir).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise RunError(f"{flag} must be a folder, and {path} is a file; choose another")
    return path


def result_folder(workdir: str | Path | None, name: str, flag: str = "--workdir") -> Path:
    """Make and return the folder for results that are written once: a new one, or an empty one."""
    path = new_folder(name) if workdir is None else local(workdir, flag)
    if path.exists() and any(path.iterdir()):
        raise RunError(f"{flag} must be a new or empty folder, and {path} is not; choose another")
    make(path, flag)
    return path


def try_output(name: str | Path, flag: str) -> Path:
    """Return the path of a file that a flag names, if it can be written, before the work."""
    path = Path(name).expanduser().absolute()
    make(path.parent, flag)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise RunError(f"{flag} must be a file that can be written, got {path}; choose another")
    return path


def make(path: Path, flag: str) -> None:
    """Make a folder that a flag names, with its parents."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{flag} can't make {path}: {error.strerror}; choose another") from None


def write_json(path: Path, value: Any) -> None:
    """Write a file of JSON, whole at any time."""
    write(path, json.dumps(value, indent=2) + "\n")


def write(path: Path, text: str) -> None:
    """Write a file aside, and rename it."""
    aside = path.with_name(f"{path.name}.part")
    aside.write_text(text)
    aside.replace(path)
