"""Times of several contestants in turns, so that a slow machine slows all of them."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from flax_mha import sharding

TURN = 0.005  # the seconds of a turn, long enough for the clock and the scheduler
WARM = 0.02  # calls shorter than this are preceded by one to warm caches and threads
REFUSAL = "can't run this call: "  # the words of our kernels that do not take a call


class Work(NamedTuple):
    """One contestant's computation.

    Attributes:
      call: starts one computation; its result may still be pending.
      wait: waits for a result.
      compile: the seconds that it took to trace and compile; None if nothing is compiled.
      amounts: what a computation does, by unit, such as {"GB": 1.5}.
    """

    call: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready
    compile: float | None = None
    amounts: Mapping[str, float] = {}


class Timing(NamedTuple):
    """The seconds per call: the median of the rounds, and the quartiles around it."""

    median: float
    q1: float
    q3: float
    rounds: int


class Failure(NamedTuple):
    """The reason for a missing time, and its kind: "failed" or "refused"."""

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
      The time of each work, or its failure, in the order of the contestants.
    """
    # A GPU runs the queued calls of a turn one after another; a CPU would run them side by side.
    queue = sharding.platform() != "cpu"
    results: dict[str, Any] = dict(contestants)
    works = {name: work for name, work in contestants.items() if isinstance(work, Work)}
    usual: dict[str, float] = {}
    for name, work in works.items():
        try:
            _turn(work, 1, queue)  # the first call may compile
            usual[name] = _turn(work, 1, queue)
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
    for name, times in samples.items():
        q1, median, q3 = (float(q) for q in np.percentile(times, [25, 50, 75]))
        results[name] = Timing(median, q1, q3, len(times))
    return results


def _turn(work: Work, calls: int, queue: bool) -> float:
    """Return the seconds per call."""
    start = time.perf_counter()
    for i in range(calls):
        result = work.call()
        if not queue or i == calls - 1:
            work.wait(result)
    return (time.perf_counter() - start) / calls


def program(function: Callable[..., Any], arguments: Sequence[Any], donates: bool = False) -> Work:
    """Compile a function for arguments, and return the work of calling it.

    If it `donates`, its result is a pair, whose second part replaces the first argument, a cache.
    Keys and values are donated. Positions stay, so that every call does the same.
    """
    leaves, tree = jax.tree.flatten(list(arguments))
    cached = len(jax.tree.leaves(arguments[0])) if donates else 0
    moves = [n < cached and x.ndim > 2 for n, x in enumerate(leaves)]

    def split(leaves: Sequence[Any], moving: bool) -> list[Any]:
        return [x for x, move in zip(leaves, moves, strict=False) if move == moving]

    def call(moving: list[Any], still: list[Any]) -> Any:
        sources = {True: iter(moving), False: iter(still)}
        result = function(*jax.tree.unflatten(tree, [next(sources[move]) for move in moves]))
        out, new = result if donates else (result, ())
        return out, split(jax.tree.leaves(new), True)

    moving, still = split(leaves, True), split(leaves, False)
    start = time.perf_counter()
    compiled = jax.jit(call, donate_argnums=0).lower(moving, still).compile()
    seconds = time.perf_counter() - start

    def step() -> Any:
        nonlocal moving
        out, moving = compiled(moving, still)
        return out

    return Work(step, compile=seconds)


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of (cotangent, *arguments) to the output, and all gradients."""

    def both(cotangent: jax.Array, *arguments: Any) -> Any:
        out, pull = jax.vjp(function, *arguments)
        return out, *pull(cotangent.astype(out.dtype))

    return both


def reason(error: BaseException) -> str:
    """Return an error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def attempt(make: Callable[[], Any]) -> Any:
    """Return the result of make, or a Failure, which may be a refusal."""
    try:
        return make()
    except RefusalError as refusal:
        return Failure(str(refusal), "refused")
    except ModuleNotFoundError as error:
        return Failure(f"{error.name} is not installed", "refused")
    except Exception as error:  # a peer may raise anything
        if REFUSAL in str(error):
            return Failure(str(error).split(REFUSAL)[1].split("; ")[0], "refused")
        return Failure(reason(error))
