"""Times of several contestants in turns, so that a slow machine slows all of them."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
      tokens: the tokens that it decodes or reads, for steps with a cache.
    """

    call: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready
    compile: float | None = None
    tokens: int = 0


class RefusalError(Exception):
    """The reason why a contestant does not take part."""


def race(
    contestants: Mapping[str, Callable[[], Work]], rounds: int, seconds: float, baseline: str = ""
) -> dict[str, dict[str, Any]]:
    """Build the works of contestants, and call each in turn, many times.

    Args:
      contestants: functions that build the works, by name.
      rounds: the maximum number of rounds.
      seconds: the time for the rounds. Each work has an equal share, and at least one round.
      baseline: the contestant whose speed is 1 in the ratios; "" for the fastest.

    Returns:
      The results of each contestant: its "status" ("ok", "failed" or "refused"), and the "reason";
      or the "median" seconds of a call and the quartiles "q1" and "q3", the number of "rounds", the
      "ratio", the "tokens" a second of steps, and the seconds to "compile".
    """
    rows: dict[str, dict[str, Any]] = {name: {} for name in contestants}
    works, usual = dict[str, Work](), dict[str, float]()
    for name, build in contestants.items():
        with noted(rows[name]):
            work = build()
            _turn(work, 1)  # the first call may compile
            usual[name], works[name] = _turn(work, 1), work
    share = seconds / max(1, len(usual))
    samples: dict[str, list[float]] = {name: [] for name in works}
    gc.collect()
    for done in range(rounds):
        # Those whose turns so far took less than their share.
        order = [name for name in works if done * (TURN + usual[name]) < share]
        shift = done % max(1, len(order))  # each starts one round and ends another
        for name in order[shift:] + order[:shift]:
            calls = max(1, min(100, round(TURN / usual[name])))
            with noted(rows[name]):
                if usual[name] < WARM:
                    _turn(works[name], 1)
                samples[name].append(_turn(works[name], calls))
            if rows[name]["status"] != "ok":
                del works[name]
    medians = dict[str, float]()
    for name, work in works.items():
        q1, median, q3 = map(float, np.percentile(samples[name], [25, 50, 75]))
        medians[name] = median
        rows[name] |= {"median": median, "q1": q1, "q3": q3, "rounds": len(samples[name]),
                       "compile": work.compile, "tokens": work.tokens / median}  # fmt: skip
    base = medians.get(baseline, 0.0) if baseline else min(medians.values(), default=0.0)
    for name, median in medians.items():
        rows[name]["ratio"] = base / median
    return rows


@contextlib.contextmanager
def noted(row: dict[str, Any]) -> Iterator[None]:
    """Note the status of what the context does in a row, with the reason if it fails."""
    row["status"] = "ok"
    try:
        yield
    except ModuleNotFoundError as error:
        row |= {"status": "refused", "reason": f"{error.name} is not installed"}
    except Exception as error:  # a peer may raise anything
        lines = str(error).strip().splitlines()
        if isinstance(error, RefusalError):
            row |= {"status": "refused", "reason": str(error)}
        elif REFUSAL in str(error):
            row |= {"status": "refused", "reason": str(error).split(REFUSAL)[1].split("; ")[0]}
        else:
            name = type(error).__name__
            row |= {"status": "failed", "reason": ": ".join([name, *lines[:1]])[:200]}


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a row: the median in ms, the middle half of the rounds, and the ratio."""
    if row["status"] != "ok":
        return [f"{row['status']}: {row['reason']}", "", ""]
    median, q1, q3 = (f"{1000 * row[name]:.4g}" for name in ("median", "q1", "q3"))
    return [median, f"{q1}–{q3}", f"{row['ratio']:.2f}" if row["ratio"] else ""]


def _turn(work: Work, calls: int) -> float:
    """Return the seconds per call."""
    # A GPU runs the queued calls of a turn one after another; a CPU would run them side by side.
    queue = sharding.platform() != "cpu"
    start = time.perf_counter()
    for i in range(calls):
        result = work.call()
        if not queue or i == calls - 1:
            work.wait(result)
    return (time.perf_counter() - start) / calls


def program(function: Callable[..., Any], arguments: Sequence[Any], donates: bool = False) -> Work:
    """Compile a function for arguments, and return the work of calling it.

    If it `donates`, its result is a pair, whose second part replaces the first argument, a cache.
    Positions in the cache stay, so that every call does the same.
    """
    held = list(arguments)

    def call(*arguments: Any) -> Any:
        result = function(*arguments)
        if not donates:
            return result
        out, new = result
        return out, jax.tree.map(lambda old, x: x if x.ndim > 2 else old, arguments[0], new)

    start = time.perf_counter()
    compiled = jax.jit(call, donate_argnums=(0,) if donates else ()).lower(*held).compile()
    seconds = time.perf_counter() - start

    def run() -> Any:
        result = compiled(*held)
        if donates:
            result, held[0] = result
        return result

    return Work(run, compile=seconds)


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of (cotangent, *arguments) to the output, and all gradients."""

    def both(cotangent: jax.Array, *arguments: Any) -> Any:
        out, pull = jax.vjp(function, *arguments)
        return out, *pull(cotangent.astype(out.dtype))

    return both
