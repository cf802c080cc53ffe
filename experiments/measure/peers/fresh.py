"""Peak memory and compile time of one contestant for one case, in its own process."""

import ctypes
import dataclasses
import gc
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.measure import timing
from experiments.measure.peers import contestants
from experiments.measure.peers.cases import Case
from experiments.measure.timing import Failure, RefusalError

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Weight(NamedTuple):
    """The measurements of a fresh process.

    Attributes:
      bytes: the peak memory of a call beyond inputs, parameters and compiled code.
      compile: the seconds to trace and compile; None if nothing is compiled.
    """

    bytes: int
    compile: float | None


def weigh(name: str, case: Case) -> Weight | Failure:
    """Measure a contestant in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_weigh, name, case).result()
        except BrokenProcessPool:
            return Failure("the process was killed, usually for lack of memory")


def _weigh(name: str, case: Case) -> Any:
    return timing.attempt(lambda: _measure(name, case))


def _measure(name: str, case: Case) -> Weight:
    # Load the libraries' code, which would otherwise count as memory of the call.
    small = contestants.build(name, dataclasses.replace(case, B=1, T=16, window=0))
    small.wait(small.call())
    work = contestants.build(name, case)

    def run() -> Any:
        result = work.call()
        work.wait(result)
        return result

    return Weight(growth(run), work.compile)


def growth(call: Callable[[], Any]) -> int:
    """Return the peak memory during a call minus the memory held before it.

    On a GPU it is the memory of JAX or of torch, whose peak may be an earlier compilation's.
    Elsewhere it is the resident size of this process, because XLA's account of a CPU program leaves
    out scratch memory.
    """
    device, torch = jax.local_devices()[0], sys.modules.get("torch")
    if device.platform != "cpu":
        on_gpu = torch and torch.cuda.is_available()

        def held(ours: str, theirs: str) -> int:
            more = torch.cuda.memory_stats()[theirs] if on_gpu else 0  # type: ignore[union-attr]
            return int(device.memory_stats()[ours] + more)

        before = held("bytes_in_use", "allocated_bytes.all.current")
        call()
        return held("peak_bytes_in_use", "allocated_bytes.all.peak") - before
    if not STATUS.exists():
        raise RefusalError("peak memory is read from /proc, which this system lacks")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that the allocator keeps would hide growth
    RESET.write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    result = call()
    peak = _status("VmHWM")
    del result
    return max(0, peak - before)


def _status(key: str) -> int:
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:")]
    return 1024 * int(line.split()[1])
