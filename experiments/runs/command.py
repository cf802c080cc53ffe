"""The command lines of the programs, by absl. A mistake in one is a `RunError`."""

import sys
from collections.abc import Callable, Sequence

from absl import app, flags
from absl import logging as absl_logging

from experiments.runs.failures import RunError, boundary


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
            *_, last = str(error).strip().replace("\\n", "\n").splitlines() or [""]
            raise RunError(f"{last.strip(chr(34) + chr(39))}; see --help") from None
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
