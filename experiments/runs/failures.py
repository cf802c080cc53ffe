"""Errors as one line: a mistake of the user, or something that the machine lacks.

`experiments/__init__.py` installs this for the commands, so that it covers their imports too.
"""

import errno
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

# The packages of the extra `experiments`, by the names of their modules.
PACKAGES = {
    "absl", "babel", "chex", "flax", "flax_mha", "grain", "jax", "matplotlib", "ml_collections",
    "numpy", "optax", "orbax", "rich", "sklearn", "tensorboardX", "threadpoolctl",
}  # fmt: skip
FULL = "make room, or give a --workdir elsewhere"
BARRED = "give a --workdir that can be written"
REMEDIES = {
    errno.ENOSPC: FULL, errno.EDQUOT: FULL, errno.EFBIG: FULL, errno.EIO: FULL,
    errno.EROFS: BARRED, errno.EACCES: BARRED, errno.EPERM: BARRED, errno.ENOTDIR: BARRED,
    errno.EEXIST: BARRED, errno.EISDIR: BARRED, errno.ENAMETOOLONG: BARRED,
}  # fmt: skip


INTERRUPTED = 130  # the exit status that shells give for Ctrl-C
_needed: dict[Path, int] = {}  # the inodes of what the program works with, by path


class RunError(ValueError):
    """A mistake that its message explains, without a traceback."""


def install() -> None:
    """Install the hooks that report errors in one line, from the imports on."""
    sys.excepthook, sys.unraisablehook = say, unraisable
    threading.excepthook = in_thread


def needs(path: Path) -> None:
    """Register a file or folder, whose loss then explains any error that follows."""
    _needed[path] = path.stat().st_ino


def reason(error: BaseException) -> str | None:
    """Return the line that reports an error of the user or the machine, or None for others."""
    chain = list(_chain(error))
    if any(isinstance(each, KeyboardInterrupt) for each in chain):
        saved = [f"to go on from what was saved: --workdir={path.parent}" for path in _needed]
        return f"interrupted; {saved[0] if saved else 'nothing was begun'}"
    if (folder := _lost([str(each) for each in chain])) is not None:
        return (
            f"{folder}, or a part of it, was removed while it was written to; nothing more is saved"
        )
    for each in chain:
        if isinstance(each, ModuleNotFoundError) and each.name:
            package = each.name.partition(".")[0]
            if package in PACKAGES:
                return (
                    f"the package {package} is not installed; all that experiments need comes "
                    f"with pip install -e '.[experiments]'"
                )
        if isinstance(each, RuntimeError) and str(each).startswith("Unable to initialize backend"):
            return str(each).splitlines()[0]
        if isinstance(each, OSError) and each.errno in REMEDIES:
            place = f": {each.filename}" if each.filename else ""
            return f"{os.strerror(each.errno)}{place}; {REMEDIES[each.errno]}"
    for each in chain:  # Orbax passes on the words of a library that is not Python's.
        for code, remedy in REMEDIES.items():
            if os.strerror(code) in str(each):
                return f"{os.strerror(code)}; {remedy}"
    return None


def say(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print one line where `reason` has one and end, or else a traceback: for `sys.excepthook`."""
    line = reason(error)
    if line is None:
        sys.__excepthook__(kind, error, traceback)
        return
    sys.stdout.flush()
    print(f"error: {line}", file=sys.stderr, flush=True)
    # At once: what is half written would complain while Python is taken down.
    os._exit(INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1)


def in_thread(args: "threading.ExceptHookArgs") -> None:
    """End the program where any thread lacks something of the machine: a `threading.excepthook`.

    Others might wait for that thread for ever, as TensorBoard's writer is waited for.
    """
    if args.exc_value is not None and reason(args.exc_value) is not None:
        say(args.exc_type, args.exc_value, args.exc_traceback)
    threading.__excepthook__(args)


def unraisable(args: "sys.UnraisableHookArgs") -> None:
    """Show the errors that nobody can catch, but one: a `sys.unraisablehook`."""
    # Threads of Orbax say so after the error that counts.
    if str(args.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(args)


def said_later(record: logging.LogRecord) -> bool:
    """Drop from logs the errors of threads that end a command with one line."""
    error = record.exc_info[1] if record.exc_info else None
    return _lost([record.getMessage()]) is None and (error is None or reason(error) is None)


def _lost(texts: Iterable[str]) -> Path | None:
    """Return a folder that is gone, or that one of the texts says to lack a file."""
    for path, inode in _needed.items():
        if not path.exists() or path.stat().st_ino != inode:
            return path.parent
        if any(str(path.parent) in text and os.strerror(errno.ENOENT) in text for text in texts):
            return path.parent
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for each in error.exceptions:
                yield from _chain(each)
        error = error.__cause__ or error.__context__
