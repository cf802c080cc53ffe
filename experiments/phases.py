"""Progress of a command: a line on stderr as each phase begins, and again while it lasts.

`experiments/__init__.py` prints the first line before JAX is imported, so this module must import
fast.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

EVERY = 4.0  # seconds between lines, so that nobody waits for 5; later a hundredth of the phase
LOADING = "loading JAX and what goes with it"
_HELP = re.compile(r"--?h(elp\w*)?")
_RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK")

quiet = False  # True in all processes of a run but the first
_open: list["Phase"] = []  # the innermost is last, and the only one that prints
_said = 0.0  # the time of the last line


class Phase:
    """A context manager around something that takes time.

    Args:
      text: the description, such as "compiling the step".
      aloud: prints a line as the phase begins; if False, only a phase that lasts prints lines.
      over: returns True once the phase has ended by itself.

    Attributes:
      detail: the progress, added to each line; may be changed while the phase lasts.
    """

    def __init__(
        self, text: str, *, aloud: bool = True, over: Callable[[], bool] = lambda: False
    ) -> None:
        self._text, self._aloud, self._over, self.detail = text, aloud, over, ""
        self._ended = threading.Event()

    def __enter__(self) -> "Phase":
        self._start = time.monotonic()
        _open.append(self)
        if self._aloud:
            say(f"{self._text} …", sys.stderr)
        # The thread ends with the process, even if the phase does not.
        threading.Thread(target=self._go_on, name=self._text, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        _open.remove(self)

    def _go_on(self) -> None:
        while not self._ended.wait(max(0.02, self._left())):
            if self._over():
                self.__exit__()
            elif self._left() <= 0 and _open[-1:] == [self]:
                seconds = time.monotonic() - self._start
                say(f"still {self._text}, {seconds:.0f} s{self.detail}", sys.stderr)

    def _left(self) -> float:
        """Return the seconds until the next line is due."""
        now = time.monotonic()
        return max(self._start, _said) + max(EVERY, (now - self._start) / 100) - now


def say(line: str, file: TextIO | None = None) -> None:
    """Print a line at once, on stdout if no file is given, except in processes after the first."""
    global _said
    _said = time.monotonic()
    if not quiet:
        file = file or sys.stdout
        file.write(f"{line}\n")  # in one piece, so that other threads cannot split it
        file.flush()


def begin(argv: list[str]) -> None:
    """Print that a command's modules are imported, until it has its `main`.

    Args:
      argv: its arguments; with --help nothing is printed, and only the first of several processes
        prints.
    """
    global quiet
    quiet = _rank(argv) > 0
    if not any(map(_HELP.fullmatch, argv)):
        Phase(LOADING, over=lambda: hasattr(sys.modules["__main__"], "main")).__enter__()


def _rank(argv: list[str]) -> int:
    """Return this process's index in the run, as far as it is known before JAX starts."""
    line = " ".join(argv)
    if match := re.search(r"--?process_id[= ](\d+)", line):
        return int(match[1])
    ranks = [os.environ[name] for name in _RANKS if name in os.environ]
    return int(ranks[0]) if ranks and re.search(r"--?distributed\b", line) else 0
