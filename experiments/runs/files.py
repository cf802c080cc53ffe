"""Files that are there whole or not at all, and files of folders that may hold anything."""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from experiments.runs.failures import RunError

ASIDE = ".aside-"  # in front of a name: not whole yet
MOST = 2**20  # bytes of a JSON file that is read: those of runs have a few thousand
SHARE = 10  # the part of the memory that data may have: the order of bytes takes 8 more


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file beside a path, which takes the path's name at the end, on the disk too.

    The file is made exclusively, so that nothing is written through a link that lies there.
    """
    aside = _beside(path)
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(handle)
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


def _beside(path: Path) -> Path:
    """Return a free name beside a path that is free, or of a file."""
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "not a regular file", str(path))
    aside = path.with_name(ASIDE + path.name)
    aside.unlink(missing_ok=True)
    return aside


def try_output(name: str | Path, flag: str) -> Path:
    """Return the path of a file that a flag names, after a trial to write it, before the work."""
    path = Path(name).expanduser().absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = _beside(path)
        aside.touch()
        aside.unlink()
    except OSError as error:
        raise RunError(
            f"{flag} must be a file that can be written, got {path}: {error.strerror}; choose "
            f"another"
        ) from None
    return path


def write(path: Path, text: str) -> None:
    """Write a file aside and rename it."""
    with replacing(path) as file:
        file.write(text.encode())


def to_json(value: Mapping[str, Any]) -> str:
    """Return an object as the text of a file that `read_json` reads."""
    try:
        text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    except ValueError as error:
        raise RunError(f"a config must hold finite numbers, got: {error}") from None
    if len(text) > MOST:
        raise RunError(
            f"a config must have at most {MOST:,} characters in JSON, got {len(text):,}; let its "
            f"code read long lists from a file"
        )
    return text


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file aside and rename it."""
    write(path, to_json(value))


def append(path: Path, text: str) -> None:
    """Add text to a regular file that is there, or wait until it is on the disk without text.

    Raises:
      OSError: if it is missing, a link, a pipe or a device.
    """
    with _open(path, os.O_WRONLY | os.O_APPEND, "ab") as file:
        file.write(text.encode())
        file.flush()
        if not text:
            os.fsync(file.fileno())


def read(path: Path, most: int) -> bytes:
    """Return the first bytes of a regular file.

    Raises:
      OSError: if it is missing, a link, a pipe or a device.
    """
    with _open(path, os.O_RDONLY, "rb") as file:
        return file.read(most)


def check_tree(folder: Path) -> None:
    """Check that a folder holds nothing but files and folders, at any depth.

    A link may lead to any file of whoever writes through it, a pipe lets its reader wait for ever,
    and a device may have no end.
    """
    odd = []
    for parent, folders, names in os.walk(folder):  # which follows no links
        for path in (Path(parent, name) for name in [*folders, *names]):
            with contextlib.suppress(FileNotFoundError):  # A run may be at work there.
                mode = path.lstat().st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    kind = "a link" if stat.S_ISLNK(mode) else "a pipe, socket or device"
                    odd.append(f"{str(path.relative_to(folder))!a:.100} is {kind}")
    if odd:
        more = f", and {len(odd) - 3} more" if len(odd) > 3 else ""
        raise RunError(
            f"{folder} must hold files and folders alone, and {', '.join(sorted(odd)[:3])}{more}; "
            f"nothing was read; remove them, or choose another folder"
        )


def _open(path: Path, flags: int, mode: str) -> IO[bytes]:
    # A pipe would wait for ever; a link leads to files that nobody named.
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError("not a regular file")
    return open(handle, mode)


def read_json(path: Path, most: int = MOST) -> dict[str, Any]:
    """Return the JSON object in a file of at most some bytes, which anybody may have written."""
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


def read_data(path: str, at_least: int = 0, key: str = "config.data.path") -> bytes:
    """Return the bytes of a file that a user names by a key of the config, if it has enough."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // SHARE
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise OSError("it is no regular file")
        if (size := Path(path).stat().st_size) > most:
            raise OSError(f"it has {size:,} bytes, and this machine's memory holds {most:,}")
        data = Path(path).read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"{key} must be a file, got {path:.300}: {reason}") from None
    if len(data) < at_least:
        raise RunError(f"{path} must hold at least {at_least} bytes, got {len(data)}; give more")
    return data


def read_pairs(path: str, at_least: int = 0) -> list[tuple[str, str]]:
    """Return the different pairs in the file that config.data.path names, in its order.

    Each line is a source, a tab and a target.
    """
    try:
        lines = read_data(path).decode().splitlines()
    except UnicodeDecodeError as error:
        raise RunError(f"config.data.path must be a text file of pairs: {error}") from None
    # A pair that is there twice must not be both learnt from and asked.
    pairs: dict[tuple[str, str], None] = {}
    for number, line in enumerate(lines, 1):
        source, tab, target = line.partition("\t")
        if not (source and tab and target) or "\t" in target:
            raise RunError(
                f"each line of {path} must be a source, a tab and a target, got {line!r:.100} in "
                f"line {number}"
            )
        pairs[source, target] = None
    if len(pairs) < at_least:
        raise RunError(f"{path} must hold at least {at_least} different pairs, got {len(pairs)}")
    return list(pairs)
