"""Several processes as one run: how they find each other, and agree before the first step."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils

from experiments.common.failures import RunError

T = TypeVar("T")


def start(
    address: str | None, processes: int | None, process: int | None, start_timeout: int = 300,
    heartbeat_timeout: int = 100,
) -> None:  # fmt: skip
    """Join the other processes, before anything asks for devices.

    Args:
      address: HOST:PORT at which process 0 listens; None to ask the cluster, as for the others.
      processes: the number of processes.
      process: the number of this process.
      start_timeout: the seconds until all have started.
      heartbeat_timeout: the seconds of silence after which a process counts as dead.
    """
    try:
        jax.distributed.initialize(
            address, processes, process, initialization_timeout=start_timeout,
            heartbeat_timeout_seconds=heartbeat_timeout,
        )  # fmt: skip
    except (ValueError, RuntimeError) as error:
        raise RunError(
            f"--distributed can't join the other processes: {error}; give --coordinator_address="
            f"HOST:PORT --num_processes=N --process_id=I to each process, or none of them where "
            f"SLURM, Open MPI, Kubernetes or a Cloud TPU knows them"
        ) from error
    # On CPUs programs wait for each other by blocking threads, of which two programs at a time can
    # need more than there are.
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def agree(prepared: dict[str, Any]) -> None:
    """Wait for all processes, and check that they prepared the same values, nested by name."""
    texts = _gather(json.dumps(prepared, sort_keys=True))
    first, *others = (flatten_dict(json.loads(text), sep=" ") for text in texts)
    for i, other in enumerate(others, 1):
        for key in sorted(first | other):
            if first.get(key) != other.get(key):
                raise RunError(
                    f"all processes need the same config and data, and {key} is "
                    f"{first.get(key)!r} at process 0 and {other.get(key)!r} at process {i}; give "
                    f"all the same files and flags"
                )


def all_or_none(work: Callable[[], T]) -> T:
    """Return the result of some work on this process, unless it is refused on any."""
    result, refused = None, ""
    try:
        result = work()
    except RunError as error:
        refused = str(error)
    for reason in _gather(refused):
        if reason:
            raise RunError(refused or reason)
    return result  # type: ignore[return-value]


def from_first(work: Callable[[], str]) -> str:
    """Return the text that some work on process 0 gives, on all processes."""
    return _gather(work() if jax.process_index() == 0 else "")[0]


def _gather(text: str) -> list[str]:
    """Return the text of each process."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(data.size))
    rows = multihost_utils.process_allgather(np.pad(data, (0, int(sizes.max()) - data.size)))
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]
