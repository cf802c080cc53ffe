"""Peak memory and compile time of one contestant for one case, in its own process.

python -m experiments.measure.peers.fresh NAME CASE-AS-JSON FREE-BYTES
"""

import ctypes
import dataclasses
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.measure import timing
from experiments.measure.peers import contestants
from experiments.measure.peers.cases import Case
from experiments.measure.timing import Failure

ROOT = Path(__file__).parents[3]
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Weight(NamedTuple):
    """The measurements of a fresh process.

    Attributes:
      bytes: the peak memory of a call beyond inputs, parameters and compiled code.
      compile: the seconds to trace and compile; None if nothing is compiled.
    """

    bytes: int
    compile: float | None


def weigh(name: str, case: Case, free: int | None, seconds: float) -> Weight | Failure:
    """Measure a contestant in a fresh process, with a limit of seconds and, if known, of bytes."""
    command = [sys.executable, "-m", "experiments.measure.peers.fresh", name]
    command += [json.dumps(dataclasses.asdict(case)), json.dumps(free)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return Failure(f"took more than {seconds:.0f} s")
    if done.returncode < 0:
        return Failure(
            f"killed by signal {-done.returncode}; signal 9 usually means lack of memory"
        )
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
        return Failure(answer["reason"]) if "reason" in answer else Weight(**answer)
    except (IndexError, ValueError, TypeError):
        last = done.stderr.strip().splitlines()[-1:]
        return Failure(f"exited with {done.returncode}: {''.join(last)}")


def growth(call: Callable[[], Any]) -> int:
    """Return the peak memory during a call minus the memory held before it.

    On a GPU it is the device's memory, whose peak may be an earlier compilation's. Elsewhere it is
    the resident size of this process, because XLA's account of a CPU program leaves out scratch
    memory.
    """
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        before = device.memory_stats()["bytes_in_use"]
        call()
        return int(device.memory_stats()["peak_bytes_in_use"] - before)
    gc.collect()
    if not STATUS.exists():
        unit = 1 if sys.platform == "darwin" else 1024
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        call()
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most) * unit
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


def _measure(name: str, case: Case, free: int | None) -> Weight:
    # Load the libraries' code, which would otherwise count as memory of the call.
    small = contestants.build(name, dataclasses.replace(case, B=1, T=16, window=0))
    small.wait(small.call())
    work = contestants.build(name, case, free)
    call, seconds = work.call, None
    if work.compile:
        start = time.perf_counter()
        call = work.compile()
        seconds = time.perf_counter() - start

    def run() -> Any:
        result = call()
        work.wait(result)
        return result

    return Weight((work.growth or growth)(run), seconds)


def main(name: str, case: str, free: str) -> None:
    """Print the measurements, or the reason of their absence, as the last line."""
    result = timing.attempt(lambda: _measure(name, Case(**json.loads(case)), json.loads(free)))
    print(json.dumps(result._asdict()))


if __name__ == "__main__":
    main(*sys.argv[1:])
