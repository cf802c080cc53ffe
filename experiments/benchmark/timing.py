"""Times of several contestants, taken in turns, so that what slows the machine slows all."""

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from experiments.benchmark.work import Work

TURN = 0.005  # seconds that a turn should last, for the clock and the scheduler
WARM = 0.02  # calls shorter than this are preceded by one to warm caches and threads


class Timing(NamedTuple):
    """Seconds a call: the median of the rounds, and the quartiles around it."""

    median: float
    q1: float
    q3: float
    rounds: int


class Failure(NamedTuple):
    """Why there is no time."""

    reason: str


def interleave(
    works: Mapping[str, Work], rounds: int, seconds: float, queue: bool
) -> dict[str, Timing | Failure]:
    """Calls each in turn, many times.

    Args:
      works: by name.
      rounds: at most.
      seconds: for the rounds. Each has an equal share, and sits out once that is spent.
      queue: whether the calls of a turn may be started together, as on a GPU, where they run
        one after another. A CPU would run them side by side.

    Returns:
      A time for each, or why it failed.
    """
    results: dict[str, Timing | Failure] = {}
    usual: dict[str, float] = {}
    for name, work in works.items():
        try:
            _turn(work, 1, queue)  # compiles
            usual[name] = _turn(work, 1, queue)
        except Exception as error:  # of a peer: anything
            results[name] = Failure(reason(error))
    share = seconds / max(1, len(usual))
    # A call that takes more than its share is all that there is time for: it counts.
    samples = {name: [t] if t > share else [] for name, t in usual.items()}
    spent = {name: t if t > share else 0.0 for name, t in usual.items()}
    gc.collect()
    for done in range(rounds):
        order = [name for name in samples if spent[name] < share]
        shift = done % max(1, len(order))  # each begins a round, each ends one
        for name in order[shift:] + order[:shift]:
            calls = max(1, min(100, round(TURN / usual[name])))
            start = time.perf_counter()
            try:
                if usual[name] < WARM:
                    _turn(works[name], 1, queue)
                samples[name].append(_turn(works[name], calls, queue))
            except Exception as error:
                results[name] = Failure(reason(error))
                del samples[name]
            spent[name] += time.perf_counter() - start
    return results | {name: summary(times) for name, times in samples.items()}


def _turn(work: Work, calls: int, queue: bool) -> float:
    """Seconds a call."""
    start = time.perf_counter()
    for i in range(calls):
        result = work.call()
        if not queue or i == calls - 1:
            work.wait(result)
    return (time.perf_counter() - start) / calls


def summary(samples: list[float]) -> Timing:
    """The quartiles."""
    q1, median, q3 = (float(q) for q in np.percentile(samples, [25, 50, 75]))
    return Timing(median, q1, q3, len(samples))


def reason(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def attempt(make: Callable[[], Any]) -> Any:
    """What make gives, or a Failure."""
    try:
        return make()
    except Exception as error:
        return Failure(reason(error))
