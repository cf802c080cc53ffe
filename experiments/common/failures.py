"""The end of a command: a mistake of its user is one line, and anything else a traceback."""

import contextlib
import sys
import traceback
from collections.abc import Iterator


class RunError(ValueError):
    """A mistake of the user: the message states the rule, what came, and the remedy."""


@contextlib.contextmanager
def boundary() -> Iterator[None]:
    """End the program with one line and exit status 1 on a mistake of its user."""
    try:
        yield
    except RunError as error:
        sys.exit(f"error: {error}")
    except (ValueError, TypeError, FileNotFoundError) as error:
        if not _is_refusal(error):
            raise
        sys.exit(f"error: {error}")


def _is_refusal(error: Exception) -> bool:
    """Return True for an error that a check of flax_mha raised, in words for its user."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).startswith("flax_mha.")
