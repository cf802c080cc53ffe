"""Several processes as one run: how they find each other, agree, and end together."""

import contextlib
import ctypes
import dataclasses
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import TypeVar

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils

from experiments.runs import failures
from experiments.runs.failures import RunError

T = TypeVar("T")

# All processes need the same versions of these: others compile another program.
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
_MARGIN = 60  # seconds that JAX, whose own timeout kills without a word for users, waits longer


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The way in which this process finds the others.

    Attributes:
      address: HOST:PORT at which process 0 listens; None to ask the cluster.
      processes: the number of processes.
      process: the number of this process.
      start_timeout: the seconds until all have started.
      heartbeat_timeout: the seconds of silence after which a process counts as dead.
    """

    address: str | None = None
    processes: int | None = None
    process: int | None = None
    start_timeout: int = 300
    heartbeat_timeout: int = 100

    def check(self) -> None:
        """Check that the values fit together."""
        given = {
            "--coordinator_address": self.address,
            "--num_processes": self.processes,
            "--process_id": self.process,
        }
        missing = [name for name, value in given.items() if value is None]
        if missing and len(missing) < len(given):
            raise RunError(
                f"{', '.join(given)} go together, and {', '.join(missing)} is missing; give all "
                f"three, or none where SLURM, Open MPI, Kubernetes or a Cloud TPU knows them"
            )
        if self.address is None or self.processes is None or self.process is None:
            return
        if not re.fullmatch(r".+:\d+", self.address):
            raise RunError(
                f"--coordinator_address must be HOST:PORT, such as 10.0.0.1:1234, got "
                f"{self.address!r}"
            )
        if not 0 <= self.process < self.processes:
            raise RunError(
                f"--process_id must be one of 0 … --num_processes − 1, got "
                f"{self.process} of {self.processes}"
            )


def start(cluster: Cluster) -> None:
    """Join the other processes, before anything asks for devices.

    It ends the process, with a message, if they do not come together in time.
    """
    cluster.check()
    if cluster.address is not None and cluster.process == 0:
        _check_free(cluster.address)
    watch = threading.Timer(cluster.start_timeout, _give_up, [cluster])
    watch.daemon = True
    watch.start()
    try:
        jax.distributed.initialize(
            cluster.address, cluster.processes, cluster.process,
            initialization_timeout=cluster.start_timeout + _MARGIN,
            heartbeat_timeout_seconds=cluster.heartbeat_timeout,
        )  # fmt: skip
    except (ValueError, RuntimeError) as error:
        if cluster.address is None:
            raise RunError(
                f"--distributed found no cluster of SLURM, Open MPI, Kubernetes or Cloud TPU "
                f"({error}); give --coordinator_address=HOST:PORT --num_processes=N "
                f"--process_id=I to each process"
            ) from error
        raise RunError(
            f"process {cluster.process} of {cluster.processes} can't join {cluster.address}: "
            f"{error}; choose another port, or another host for process 0"
        ) from error
    finally:
        watch.cancel()
    # On CPUs programs wait for each other by blocking threads, of which two programs at a time can
    # need more than there are.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    ctypes.CDLL(None).signal(signal.SIGABRT, _aborted)


def force_host_devices(count: int) -> int:
    """Make a number of CPU devices of this host's cores, unless the environment sets it.

    Devices of other platforms stay as they are.

    Args:
      count: the CPU devices of this process; 0 leaves them as they are.

    Returns:
      The number that was made; 0 for none.
    """
    said = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if count == 0 or said or "JAX_NUM_CPU_DEVICES" in os.environ:
        return 0
    jax.config.update("jax_num_cpu_devices", count)
    # Threads for XLA: with those of few cores, many devices can wait for each other for ever.
    os.environ.setdefault("NPROC", str(4 * count))
    return count


def agree(prepared: dict[str, object] | None) -> None:
    """Wait for all processes, and check that they prepared the same.

    Args:
      prepared: the settings of this one; None if it could not prepare, and says so itself.
    """
    if jax.process_count() == 1:
        return
    versions = {f"the version of {name}": metadata.version(name) for name in PACKAGES}
    texts = _gather("" if prepared is None else json.dumps(prepared | versions, sort_keys=True))
    if prepared is None:
        return
    if refused := [i for i, text in enumerate(texts) if not text]:
        raise RunError(f"processes {refused} could not start, and say why; so no other starts")
    first, *others = (flatten_dict(json.loads(text), sep=".") for text in texts)
    for i, other in enumerate(others, 1):
        differ = sorted(key for key in first | other if first.get(key) != other.get(key))
        if differ:
            raise RunError(
                f"all processes need the same settings, data and packages, and {differ[0]} is "
                f"{first.get(differ[0])!r} at process 0 and {other.get(differ[0])!r} at process "
                f"{i}; give all the same packages, files, variables, and flags save --process_id"
            )


def all_begin(refused: str | None) -> None:
    """Wait for all processes, and check that each may begin.

    Args:
      refused: the reason why this one may not; None if it may.
    """
    reasons = [refused or ""] if jax.process_count() == 1 else _gather(refused or "")
    for reason in reasons:
        if reason:
            raise RunError(refused or reason)


def on_first(work: Callable[[], T]) -> T | None:
    """Return the result of some work on process 0, and None elsewhere; all raise its error."""
    result, refused = None, None
    if jax.process_index() == 0:
        try:
            result = work()
        except Exception as error:  # such as a tracker's, about an address or a login
            refused = failures.describe(error)
    all_begin(refused)
    return result


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """End this process at once, loudly, on an error inside, so that no other waits for it.

    JAX would wait for the others first, which wait for this one. They end when its heartbeat, or
    its end of a collective, is missing.
    """
    try:
        yield
    except (SystemExit, RunError):
        raise  # All come here alike.
    except BaseException as error:
        if jax.process_count() == 1:
            raise
        place = f"process {jax.process_index()} of {jax.process_count()}"
        if isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error):
            # The collective that a peer left says that it is gone.
            reason = str(error).splitlines()[0]
            line = f"{place} stops, most likely because another one ended: {reason}"
        else:
            line = f"{place} failed, and the others will end too: {failures.describe(error)}"
        end(f"{line}; to go on from the last checkpoint, start all with the same --workdir")


def _gather(text: str) -> list[str]:
    """Return the text of each process."""
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(data.size))
    padded = np.pad(data, (0, int(sizes.max()) - data.size))
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def _check_free(address: str) -> None:
    """Check that no program serves a port of this host: JAX would crash there."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    port = int(address.rsplit(":", 1)[1])
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except (OSError, OverflowError) as error:
        raise RunError(
            f"process 0 must serve --coordinator_address={address}, and can't: {error}; choose "
            f"another port (and the host of process 0)"
        ) from error


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _aborted(_: int) -> None:
    """End with a line: a handler of C, where JAX aborts a process that lost the others.

    One of Python's would run in the main thread, which waits for them for ever.
    """
    end(
        "this process lost another one: it ended, or sent no sign for --heartbeat_timeout seconds; "
        "to go on from the last checkpoint, start all with the same --workdir"
    )


def _give_up(cluster: Cluster) -> None:
    who = "its processes" if cluster.processes is None else f"{cluster.processes} processes"
    end(
        f"no run of {who} came together"
        f"{f' at {cluster.address}' if cluster.address else ''} within "
        f"{cluster.start_timeout} s (--start_timeout); check that all of them were started, each "
        f"with its own --process_id, and can reach process 0 at that address"
    )


def end(message: str) -> None:
    """End this process at once: its absence ends the others too, even if they wait for it."""
    failures.tell(message)
    os._exit(1)
