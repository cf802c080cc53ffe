"""Lines about what a command does now.

`experiments/__init__.py` prints the first before JAX is imported, so this module must import fast.
"""

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import TextIO

quiet = False  # True in all processes of a run but the first


@contextlib.contextmanager
def phase(text: str) -> Iterator[None]:
    """Print on stderr that something begins that takes time, such as "compiling the step"."""
    say(f"{text} …", sys.stderr)
    yield


def say(line: str, file: TextIO | None = None) -> None:
    """Print a line at once, on stdout if no file is given, except in processes after the first."""
    if not quiet:
        print(line, file=file or sys.stdout, flush=True)


def begin(argv: list[str]) -> None:
    """Print that a command's modules are imported, except for its --help."""
    if not any(re.fullmatch(r"--?h(elp\w*)?", word) for word in argv):
        say("loading JAX and what goes with it …", sys.stderr)
