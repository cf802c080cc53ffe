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
        if name.startswith("torch") and jax.default_backend() != "cpu":
            raise RefusalError("the memory of torch is not measured on a GPU")
        # Load the libraries' code, which would otherwise count as memory of the call.
        small = contestants.build(name, dataclasses.replace(case, B=1, T=16, window=0))
        small.wait(small.call())
        work = contestants.build(name, case)

        def run() -> Any:
            result = work.call()
            work.wait(result)
            return result

        row |= {"bytes": growth(run), "compile": work.compile}
    return row


def growth(call: Callable[[], Any]) -> int:
    """Return the peak memory during a call minus the memory held before it.

    On a GPU it is JAX's memory, whose peak may be an earlier compilation's. On a CPU it is the
    resident size of this process, because XLA's account of a program leaves out scratch memory.
    """
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        before = device.memory_stats()["bytes_in_use"]
        call()
        return int(device.memory_stats()["peak_bytes_in_use"] - before)
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
