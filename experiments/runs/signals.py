"""Signals that ask a run to stop, after a step and with all of it saved."""

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import jax
from jax.experimental import multihost_utils

from experiments.runs import failures
from experiments.runs.failures import RunError

STOPPED = 75  # the exit status: EX_TEMPFAIL of sysexits.h, "try again later"


class Stopped(SystemExit):
    """The end of a run that was asked to stop, after its checkpoint."""

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.code = STOPPED


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[int], bool]]:
    """Turn the first SIGINT or SIGTERM into a request that the loop can read.

    The second kills. With several processes, a signal to one stops all of them, after the same
    step; more signals change nothing there, save SIGKILL. The death of a thread is such a signal,
    and an error after it.

    Yields:
      A function of a step, called after each, that returns True if the run is to stop.
    """
    asked = threading.Event()

    def stop(step: int) -> bool:
        asks = asked.is_set() or multihost_utils.reached_preemption_sync_point(step)
        if asks:
            failures.heed()
        return asks

    together = jax.distributed.is_initialized()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # Only the main thread may handle signals.
        return
    # JAX itself listens to SIGTERM where processes run together, and tells the others.
    signals = (signal.SIGINT,) if together else (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}

    def ask(number: int, frame: FrameType | None) -> None:
        if together:
            signal.raise_signal(signal.SIGTERM)
        else:
            asked.set()
        for each in signals:
            signal.signal(each, signal.SIG_DFL)

    for number in signals:
        signal.signal(number, ask)
    failures.stop = functools.partial(os.kill, os.getpid(), signal.SIGTERM)
    try:
        yield stop
    finally:
        failures.stop = None
        for number in signals:
            signal.signal(number, before[number])
        if failures.died:
            failures.hurry()
            end = sys.exception() or "the last step was saved"
            raise RunError(f"{failures.died[0]}; {end}") from None
