"""Times of several contestants in turns, so that a slow machine slows all of them."""

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from flax_mha import sharding

TURN = 0.005  # the seconds of a turn, long enough for the clock and the scheduler
WARM = 0.02  # calls shorter than this are preceded by one to warm caches and threads


class Work(NamedTuple):
    """One contestant's computation.

    Attributes:
      call: starts one computation; its result may still be pending.
      wait: waits for a result.
      outcome: converts a result to a form that can be compared.
      compile: traces and compiles again, and returns a `call`; None if nothing is compiled.
      growth: measures a function's peak memory, if neither JAX nor the process size shows it.
    """

    call: Callable[[], Any]
    wait: Callable[[Any], Any]
    outcome: Callable[[Any], Any] = lambda result: result
    compile: Callable[[], Callable[[], Any]] | None = None
    growth: Callable[[Callable[[], Any]], int] | None = None


class Timing(NamedTuple):
    """The seconds per call: the median of the rounds, and the quartiles around it."""

    median: float
    q1: float
    q3: float
    rounds: int


class Failure(NamedTuple):
    """The reason for a missing time, and its kind: "failed" or "skipped"."""

    reason: str
    status: str = "failed"


class RefusalError(Exception):
    """The reason why a contestant does not take part."""


def interleave(
    contestants: Mapping[str, Work | Failure], rounds: int, seconds: float
) -> dict[str, Timing | Failure]:
    """Call the work of each contestant in turn, many times.

    Args:
      contestants: their works, by name; a Failure is passed through.
      rounds: the maximum number of rounds.
      seconds: the time for the rounds. Each work has an equal share, and stops once it is spent.

    Returns:
      The time of each work, or its failure.
    """
    # A GPU runs the queued calls of a turn one after another; a CPU would run them side by side.
    queue = sharding.platform() != "cpu"
    results: dict[str, Timing | Failure] = {}
    works: dict[str, Work] = {}
    usual: dict[str, float] = {}
    for name, work in contestants.items():
        if isinstance(work, Failure):
            results[name] = work
            continue
        try:
            _turn(work, 1, queue)  # compiles
            usual[name], works[name] = _turn(work, 1, queue), work
        except Exception as error:  # a peer may raise anything
            results[name] = Failure(reason(error))
    share = seconds / max(1, len(usual))
    # A call longer than its share is the only one there is time for, so it counts.
    samples = {name: [t] if t > share else [] for name, t in usual.items()}
    spent = {name: t if t > share else 0.0 for name, t in usual.items()}
    gc.collect()
    for done in range(rounds):
        order = [name for name in samples if spent[name] < share]
        shift = done % max(1, len(order))  # each starts one round and ends another
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
    """Return the seconds per call."""
    start = time.perf_counter()
    for i in range(calls):
        result = work.call()
        if not queue or i == calls - 1:
            work.wait(result)
    return (time.perf_counter() - start) / calls


def fastest(call: Callable[[], Any], rounds: int) -> float:
    """Return the least seconds of some calls of JAX, after one that compiles."""
    jax.block_until_ready(call())
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return min(times)


def summary(samples: list[float]) -> Timing:
    """Return the quartiles."""
    q1, median, q3 = (float(q) for q in np.percentile(samples, [25, 50, 75]))
    return Timing(median, q1, q3, len(samples))


def reason(error: BaseException) -> str:
    """Return an error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def attempt(make: Callable[[], Any]) -> Any:
    """Return the result of make, or a Failure, skipped if it is a refusal."""
    try:
        return make()
    except RefusalError as refusal:
        return Failure(str(refusal), "skipped")
    except Exception as error:  # a peer may raise anything
        return Failure(reason(error))
