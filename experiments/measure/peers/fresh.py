"""Peak memory and compile time of one contestant for one case, in its own process."""

import ctypes
import dataclasses
import gc
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import jax

from experiments.measure import timing
from experiments.measure.peers import contestants
from experiments.measure.peers.cases import Case
from experiments.measure.timing import RefusalError

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def weigh(name: str, case: Case) -> dict[str, Any]:
    """Measure a contestant in a fresh process.

    The result has the peak "bytes" of a call beyond inputs, parameters and compiled code, and the
    seconds to "compile", None if nothing is compiled; or the "reason" why they are missing.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_weigh, name, case).result()
        except BrokenProcessPool:
            return {"reason": "the process was killed, usually for lack of memory"}


def _weigh(name: str, case: Case) -> dict[str, Any]:
    row: dict[str, Any] = {}
    with timing.noted(row):
        # Load the libraries' code, which would otherwise count as memory of the call.
        small = contestants.build(name, dataclasses.replace(case, B=1, T=16, window=0))
        small.wait(small.call())
        work = contestants.build(name, case)
        row |= {"bytes": growth(lambda: work.wait(work.call())), "compile": work.compile}
    return row


def growth(call: Callable[[], Any]) -> int:
    """Return the peak memory during a call minus the memory held before it.

    It is the resident size of this process, because XLA's account of a program leaves out scratch
    memory.
    """
    if jax.default_backend() != "cpu" or not STATUS.exists():
        raise RefusalError("peak memory is read from Linux's /proc, for CPUs only")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that the allocator keeps would hide growth
    RESET.write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    call()
    return max(0, _status("VmHWM") - before)


def _status(key: str) -> int:
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:")]
    return 1024 * int(line.split()[1])
