"""The flags of a command: what is wrong with them is said in one line."""

import sys
from collections.abc import Sequence

from absl import flags


def parse(argv: Sequence[str], more: str = "") -> list[str]:
    """Return the words of a command line that are no flags, for `app.run(flags_parser=…)`.

    Ends the program, with one line, where a flag is wrong; or with the help that was asked for.

    Args:
      argv: the command line.
      more: what help says beyond the flags.
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
