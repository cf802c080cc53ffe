"""The boundary of every command: whatever ends it is one line, and a nonzero exit.

`experiments/__init__.py` installs this for the commands, so that it covers their imports too.
"""

import atexit
import contextlib
import errno
import logging
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

# The packages of the extra `experiments`, by the names of their modules.
PACKAGES = {
    "absl", "babel", "chex", "flax", "flax_mha", "grain", "jax", "matplotlib", "ml_collections",
    "numpy", "optax", "orbax", "rich", "sklearn", "tensorboardX", "threadpoolctl",
}  # fmt: skip
FULL, BARRED = "make room, or give a --workdir elsewhere", "give a place that can be written"
# Other errors of named files have the remedy BARRED.
REMEDIES = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO), FULL) | {
    errno.EROFS: BARRED, errno.EACCES: BARRED, errno.EPIPE: "let its reader read all of the output",
}  # fmt: skip
LONGEST = 900  # characters of a line; the rule is at its begin, the remedy at its end
INTERRUPTED = 130  # the exit status that shells give for Ctrl-C
PATIENCE = 30.0  # seconds until a loop has heeded the death of a thread
died: list[str] = []  # the errors of threads
stop: Callable[[], None] | None = None  # asks the loop, while there is one, to save and end
_last = threading.Timer(0, lambda: None)
_needed: dict[Path, int] = {}  # the inodes of what the program works with, by path


class RunError(ValueError):
    """A mistake that its message explains: any function of experiments may raise it."""


def install() -> None:
    """Install the boundary, from the imports on."""
    sys.excepthook, sys.unraisablehook, threading.excepthook = say, unraisable, in_thread
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:  # The other one takes its words, and no file its number.
            try:
                place: Any = os.dup2(3 - number, number)
            except OSError:  # It is closed, too.
                place = os.devnull
            setattr(sys, name, open(place, "w"))  # noqa: SIM115
        getattr(sys, name).reconfigure(errors="backslashreplace")
    atexit.register(_flush)


def needs(path: Path) -> None:
    """Register a file or folder, whose loss then explains any error that follows."""
    _needed[path] = path.stat().st_ino


def describe(error: BaseException) -> str:
    """Return one line about an error, which names the file of its traceback if nobody foresaw it.

    It has no control characters, which a terminal might obey.
    """
    line = reason(error)
    if line is None:
        kind, text = type(error).__name__, str(error).strip().splitlines() or [""]
        line = f"{kind}: {text[0]}; {_keep_traceback(error)}"
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} … {line[-LONGEST // 2 :]}"


def reason(error: BaseException) -> str | None:
    """Return the words for a mistake of the user or a lack of the machine, or None for others."""
    chain = list(_chain(error))
    if any(isinstance(each, KeyboardInterrupt) for each in chain):
        saved = [f"to go on from what was saved: --workdir={path.parent}" for path in _needed]
        return f"interrupted; {saved[0] if saved else 'nothing was begun'}"
    if (folder := _lost([str(each) for each in chain])) is not None:
        return (
            f"{folder}, or a part of it, was removed while it was written to; nothing more is saved"
        )
    if isinstance(error, RunError) or _is_refusal(error):
        return str(error)
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
        if isinstance(each, OSError) and not isinstance(each, FileNotFoundError):
            place = f": {each.filename}" if each.filename else ""
            if each.errno and (remedy := REMEDIES.get(each.errno, place and BARRED)):
                return f"{os.strerror(each.errno)}{place}; {remedy}"
    for each in chain:  # Orbax passes on the words of a library that is not Python's.
        for code, remedy in REMEDIES.items():
            if os.strerror(code) in str(each):
                return f"{os.strerror(code)}; {remedy}"
    return None


def say(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
    """Print the line of an error, and end: a `sys.excepthook`."""
    tell(describe(error))
    if kind is not RunError:
        # At once: what is half written would complain while Python is taken down.
        os._exit(INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1)


def tell(line: str) -> None:
    """Print an error, after all that was printed before."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        print(f"error: {line}", file=sys.stderr, flush=True)


def in_thread(args: "threading.ExceptHookArgs") -> None:
    """End the program where any thread fails: a `threading.excepthook`.

    Others might wait for that thread for ever. A loop that can save its state is asked to do so.
    """
    error = args.exc_value or args.exc_type()
    name = args.thread.name if args.thread else "a thread"
    died.append(reason(error) or f"{name} failed: {describe(error)}")
    if stop is None or reason(error):
        _end()
    stop()
    hurry()


def hurry() -> None:
    """End the program in some seconds if a thread died, whatever waits for it then."""
    global _last
    _last = threading.Timer(PATIENCE, _end)
    _last.daemon = True
    _last.start()


def heed() -> None:
    """Take back `hurry`: the state is about to be saved."""
    _last.cancel()


def _end() -> NoReturn:
    tell(died[0])
    os._exit(1)


def unraisable(args: "sys.UnraisableHookArgs") -> None:
    """Show the errors that nobody can catch, but one: a `sys.unraisablehook`."""
    # Threads of Orbax say so after the error that counts.
    if str(args.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(args)


def said_later(record: logging.LogRecord) -> bool:
    """Drop from logs the errors of threads that end a command with one line."""
    error = record.exc_info[1] if record.exc_info else None
    return _lost([record.getMessage()]) is None and (error is None or reason(error) is None)


def _is_refusal(error: BaseException) -> bool:
    """Return True for an error that a check of flax_mha raised, in words for its user."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = bool(frames) and frames[-1].f_globals.get("__name__", "").startswith("flax_mha.")
    return inside and isinstance(error, ValueError | TypeError | FileNotFoundError)


def _keep_traceback(error: BaseException) -> str:
    """Write a traceback to a file, and return the words that name it."""
    try:
        handle, path = tempfile.mkstemp(prefix="flax_mha-", suffix=".txt")
        with open(handle, "w", errors="backslashreplace") as file:
            traceback.print_exception(error, file=file)
    except OSError as barred:
        return f"its traceback can't be kept: {barred}"
    return f"its traceback is in {path}"


def _flush() -> None:
    """Write the rest of stdout, whose reader may have ended, as the last act of the program."""
    try:
        sys.stdout.flush()
    except OSError as error:
        say(type(error), error, None)


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
