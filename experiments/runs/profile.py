"""A trace of some steps, for xprof and perfetto."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from experiments.runs.failures import RunError

_WARM = 3  # the first step that a number of steps counts from: before it compiles


@contextlib.contextmanager
def tracing(folder: Path, steps: str | None, start: int) -> Iterator[Callable[[int], None]]:
    """Trace some steps into a folder, for xprof and, as `perfetto_trace.json.gz`, for perfetto.

    Args:
      folder: the folder of the trace, written by process 0.
      steps: FIRST:LAST, or a number of steps, from the third that runs; None for none.
      start: the step that the run starts from.

    Yields:
      A function to be called before each step and after the last.
    """
    first, last = parse(steps, start) if steps is not None else (0, 0)
    tracing = False

    def at(step: int) -> None:
        nonlocal tracing
        if tracing and not first <= step <= last:
            jax.effects_barrier()
            jax.profiler.stop_trace()
            tracing = False
            print(f"traced steps {first} to {step - 1}: {folder}", flush=True)
        elif not tracing and first <= step <= last and jax.process_index() == 0:
            jax.profiler.start_trace(str(folder), create_perfetto_trace=True)
            tracing = True

    try:
        yield at
    finally:
        if tracing:
            jax.profiler.stop_trace()


def parse(steps: str, start: int) -> tuple[int, int]:
    """Return the first and the last step of FIRST:LAST, or of a number of steps."""
    if match := re.fullmatch(r"(\d{1,9}):(\d{1,9})", steps):
        first, last = int(match[1]), int(match[2])
    elif re.fullmatch(r"\d{1,9}", steps):
        first, last = start + _WARM, start + _WARM + int(steps) - 1
    else:
        first, last = 0, 0
    if not 0 < first <= last:
        raise RunError(f"--profile must be a number of steps, or FIRST:LAST of them, got {steps!r}")
    return first, last
