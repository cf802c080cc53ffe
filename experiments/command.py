"""The flags of a command, with errors of one line."""

import sys
from collections.abc import Sequence

from absl import flags


def parse(argv: Sequence[str], more: str = "") -> list[str]:
    """Parse the flags, and return the other arguments, for `app.run(flags_parser=…)`.

    Ends the program with one line if a flag is wrong, and after printing help if --help is given.

    Args:
      argv: the command line.
      more: text that help prints after the flags.
    """
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(f"error: {line(error)}; see --help")
    except SystemExit:  # After the help, as if that were an error.
        if more:
            print(f"\n{more}")
        sys.exit(0)


def line(error: BaseException) -> str:
    """Return the words of an error in one line."""
    return " ".join(str(error).split())[:500]
