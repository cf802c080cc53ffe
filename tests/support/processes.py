"""Real processes that share 8 devices, and compare a program over all of them with one device."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tests.experiments.launch import free_address, started


def run_together(module: str, count: int, logs: Path) -> list[dict[str, float]]:
    """Run `python -m module ADDRESS COUNT PROCESS` in each process, and return its numbers by name.

    Each prints lines of a name, " = " and a number.
    """
    address = free_address()
    commands = [["-m", module, address, str(count), str(i)] for i in range(count)]
    with started(commands, logs) as processes:
        codes = processes.wait()
        said = [processes.said(i) for i in range(count)]
    assert codes == [0] * count, "\n".join(said)
    lines = [[line.split(" = ") for line in each.splitlines() if " = " in line] for each in said]
    return [{name: float(number) for name, number in each} for each in lines]


def join(address: str, count: str, process: str) -> None:
    """Join the processes as one of them, before any other use of JAX."""
    jax.config.update("jax_num_cpu_devices", 8 // int(count))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, int(count), int(process))


def tell_error(name: str, got: Any, wanted: Any) -> None:
    """Print the largest error of arrays over all processes, relative to the largest number."""
    got = multihost_utils.process_allgather(got, tiled=True)
    errors = jax.tree.map(lambda a, b: np.abs(a - b).max() / np.abs(b).max(), got, wanted)
    print(f"{name} = {np.max(jax.tree.leaves(errors))}", flush=True)
