"""One run in one folder: a lock that ends with its process."""

import contextlib
import errno
import fcntl
import os
import re
import socket
from pathlib import Path

from experiments.runs.failures import RunError

NAME = "lock"
_held: dict[Path, int] = {}  # Open as long as the process lives: closing the file would unlock it.


def hold(folder: Path) -> bool:
    """Lock a folder until `release`, or this process's end, however it ends.

    It is a lock of POSIX, which NFS (4, and 3 with its lock daemon) passes on to other hosts. It
    does not part the threads of one process.

    Returns:
      False if the file system has no locks.
    """
    if folder in _held:
        return True
    handle = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(handle).st_nlink:  # Its holder has just removed it.
            raise BlockingIOError(errno.EAGAIN, "removed")
    except OSError as error:
        found = os.read(handle, 300).decode(errors="replace")
        os.close(handle)
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return False
        match = re.fullmatch(r"([\w.-]+) (\d+)\n", found)
        who = f"process {match[2]} on {match[1]}" if match else "another process"
        raise RunError(
            f"{folder} is being trained by {who}; wait for its end, or choose another --workdir"
        ) from None
    os.ftruncate(handle, 0)
    os.write(handle, f"{socket.gethostname()} {os.getpid()}\n".encode())
    _held[folder] = handle
    return True


def release(folder: Path, remove: bool = False) -> None:
    """Give the folder up to another run, or remove it if there is nothing else in it."""
    if (handle := _held.pop(folder, None)) is not None:
        if remove:
            (folder / NAME).unlink()
            with contextlib.suppress(OSError):
                folder.rmdir()
        os.close(handle)
