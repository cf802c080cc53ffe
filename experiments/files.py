"""Files that are there whole or not at all, and files of folders that may hold anything."""

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.failures import RunError

ASIDE = ".aside-"  # in front of a name: not whole yet
MOST = 2**20  # bytes of a JSON file that is read: ours have a few thousand


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside this one, to be written; at the end it takes the name, on the disk too."""
    aside = path.with_name(ASIDE + path.name)
    try:
        yield aside
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # Without this a crash of the machine may forget the new name.
    finally:
        os.close(folder)


def write(path: Path, text: str) -> None:
    """Writes a file aside and renames it."""
    with replacing(path) as aside:
        aside.write_text(text)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON file aside and renames it."""
    write(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read(path: Path, most: int) -> bytes:
    """The first bytes of a regular file, which may be anything else.

    Raises:
      OSError: if it is missing, a link, a pipe or a device.
    """
    # A pipe would wait for ever; a link leads to files that nobody named.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError("not a regular file")
        return file.read(most)


def read_json(path: Path, most: int = MOST) -> dict[str, Any]:
    """The JSON object of at most so many bytes in a file that anybody may have written.

    Raises:
      RunError: if there is none, in one line.
    """
    try:
        data = read(path, most + 1)
        if len(data) > most:
            raise ValueError(f"more than {most} bytes")
        value = json.loads(data.decode(), parse_constant=_refuse)
        if not isinstance(value, dict):
            raise ValueError(f"a {type(value).__name__}, and no object")
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0][:200]
        raise RunError(f"{path} can't be read: {reason}") from None
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
