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
      seconds: after which no new round begins; slow works have one round at least.
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
    if sum(usual.values()) > seconds:  # one call of each is all that there is time for
        return results | {name: summary([usual[name]]) for name in usual}
    samples: dict[str, list[float]] = {name: [] for name in usual}
    calls = {name: max(1, min(100, round(TURN / t))) for name, t in usual.items()}
    gc.collect()
    end = time.perf_counter() + seconds
    for done in range(rounds):
        if done and time.perf_counter() > end:
            break
        order = list(samples)
        shift = done % max(1, len(order))  # each begins a round, each ends one
        for name in order[shift:] + order[:shift]:
            try:
                if usual[name] < WARM:
                    _turn(works[name], 1, queue)
                samples[name].append(_turn(works[name], calls[name], queue))
            except Exception as error:
                results[name] = Failure(reason(error))
                del samples[name]
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
