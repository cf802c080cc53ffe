"""Flags by argparse, whose mistakes are a `RunError`."""

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from experiments.runs.failures import RunError


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
