"""The command lines of the programs, by absl or argparse. A mistake in one is a `RunError`."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import app, flags
from absl import logging as absl_logging

from experiments.common.failures import RunError, boundary


def run(main: Callable[[list[str]], None], words: Sequence[str] = ()) -> None:
    """Run `main` with the words of the command line that are no flags, as `absl.app.run` does.

    Args:
      main: a function of the program's name and its words.
      words: names of the words that the program takes, for error messages.
    """

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            rest = flags.FLAGS(argv)
        # Flags of a config raise whatever its file raises, and an AttributeError for unknown keys.
        except (flags.Error, AttributeError, ValueError, OSError) as error:
            raise RunError(f"{last_line(error)}; see --help") from None
        except SystemExit:  # absl exits with status 1 after the help.
            sys.exit(0)
        if len(rest) != 1 + len(words):
            wanted = f"the arguments {' '.join(words)}" if words else "no arguments but flags"
            raise RunError(
                f"the command takes {wanted}, got {rest[1:]}; quote texts of several words"
            )
        if not flags.FLAGS["verbosity"].present:
            absl_logging.set_verbosity(absl_logging.ERROR)  # Orbax logs every save.
        return rest

    with boundary():
        app.run(main, flags_parser=parse)


def last_line(error: Any) -> str:
    """Return the last line of an error's message, or of the error that it wraps."""
    while error.args and isinstance(error.args[0], Exception):
        error = error.args[0]
    text = error.args[0] if isinstance(error, KeyError) else error  # Others don't quote it.
    return str(text).strip().rpartition("\n")[-1].strip()


class Parser(argparse.ArgumentParser):
    """A parser of flags that raises a RunError if one is wrong.

    Args:
      description: the help, which names the command.
      **options: options of `argparse.ArgumentParser`.
    """

    def __init__(self, description: str, **options: Any) -> None:
        name = re.search(r"python -m [\w.]+", description)
        style = argparse.RawDescriptionHelpFormatter
        options = {"prog": name and name[0], "allow_abbrev": False, **options}
        super().__init__(description=description, formatter_class=style, **options)

    def error(self, message: str) -> NoReturn:
        """Raise the error: argparse would print the usage, too."""
        raise RunError(f"{message}; see --help")


def count(word: str) -> int:
    """Return a whole number from 1 on, the type of a flag."""
    if not re.fullmatch(r"[0-9]{1,9}", word) or int(word) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {word!r}")
    return int(word)


def among(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a function that reads names, with commas between them: the type of a flag."""

    def read(words: str) -> tuple[str, ...]:
        for word in words.split(","):
            if word not in known:
                raise argparse.ArgumentTypeError(f"must be some of {','.join(known)}, got {word!r}")
        return tuple(words.split(","))

    return read


def seconds(word: str) -> float:
    """Return a number of seconds, the type of a flag."""
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]*)?", word) or float(word) == 0:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {word!r}")
    return float(word)
