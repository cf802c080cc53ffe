"""The flags of a command, whose errors are a `RunError`."""

import argparse
import functools
import logging
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import flags
from absl import logging as absl_logging

from experiments.runs import failures
from experiments.runs.failures import RunError


def parse(argv: Sequence[str], more: str = "", words: int = 0, rule: str = "") -> list[str]:
    """Parse the flags, and return the other arguments, for `app.run(flags_parser=…)`.

    Ends the program after printing help if --help is given.

    Args:
      argv: the command line.
      more: text that help prints after the flags.
      words: the number of other arguments, beside the command's name.
      rule: the rule for them.
    """
    try:
        rest = flags.FLAGS(argv)
    except (flags.Error, ValueError) as error:
        raise RunError(f"{line(error)}; see --help") from None
    except SystemExit:  # After the help, as if that were an error.
        if more:
            print(f"\n{more}")
        sys.exit(0)
    if len(rest) != 1 + words:
        raise RunError(f"{rule}, got {rest[1:]}")
    if not flags.FLAGS["verbosity"].present:
        # Silence Orbax, and the tracebacks of errors that end the run with one line.
        absl_logging.set_verbosity(absl_logging.ERROR)
        logging.getLogger("absl").addFilter(failures.said_later)
        # Orbax awaits only one of several reads that fail at once.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    return rest


parse_prompt = functools.partial(parse, rule="a prompt of several words must be quoted")


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


def line(error: BaseException) -> str:
    """Return the words of an error in one line."""
    return " ".join(str(error).split())
