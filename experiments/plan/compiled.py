"""Compile the trainer's own step for devices that may be absent, and read its costs."""

import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from experiments import tasks
from experiments.common.counts import traffic, work
from experiments.common.counts.hlo import Module
from experiments.common.counts.memory import shard_bytes
from experiments.common.phases import phase
from experiments.plan import collectives
from experiments.plan.collectives import Collective
from experiments.trainer import loop, mesh

# libtpu's errors: "the total memory required for … (27.97G) exceeds available HBM (15.75G)", or in
# older versions "Used 27.97G of 15.75G hbm".
_TOO_LARGE = r"([\d.]+)([BKMGT])\)? (?:exceeds available HBM \(|of )([\d.]+)([BKMGT])"


class Memory(NamedTuple):
    """The bytes on one device."""

    parameters: int
    optimizer: int  # moments and counts
    batch: int  # a batch, keys, and the padding of all arguments' layouts
    activations: int  # all that lives within a step, with gradients and gathered parameters
    peak: int  # arguments and everything alive with them; results replace arguments


class Compiled(NamedTuple):
    """A compiled step. Bytes and operations are per device."""

    sizes: dict[str, int]  # of the mesh axes
    devices: Sequence[jax.Device]  # in the mesh's order
    memory: Memory
    flops: int  # of matmuls, see `work`
    moved: int  # bytes to and from memory, see `traffic`
    sent: list[Collective]
    unknown: list[str]  # loops of unknown trip count; they count as run once
    seconds: float  # to trace and compile


class TooLargeError(ValueError):
    """The compiler's error that a program does not fit a device's memory."""

    def __init__(self, needs: float, has: float) -> None:
        super().__init__(f"needs {needs / 2**30:.1f} of {has / 2**30:.1f} GiB")
        self.needs, self.has = needs, has


def step(config: ConfigDict, devices: Sequence[jax.Device]) -> Compiled:
    """Compile the step of a run over these devices, and read its costs.

    Raises:
      TooLargeError: if the compiler finds that it does not fit.
    """
    start = time.perf_counter()
    built = loop.build(config, tasks.make(config), devices)
    state, sizes = built.abstract_state(), dict(built.mesh.shape)
    with mesh.on(built.mesh), phase(f"compiling {name(sizes)}"):
        traced = built.step.trace(state, built.abstract_batch())  # type: ignore[attr-defined]
        text, found = dumped(traced.lower())
    module, stats = Module(text), found.memory_analysis()
    parameters, optimizer = map(shard_bytes, (state.params, state.opt_state))
    arguments, activations = stats.argument_size_in_bytes, stats.temp_size_in_bytes
    produced = stats.output_size_in_bytes - stats.alias_size_in_bytes
    memory = Memory(
        parameters, optimizer, arguments - parameters - optimizer, activations,
        arguments + produced + activations,
    )  # fmt: skip
    return Compiled(
        sizes, list(built.mesh.devices.flat), memory,
        work.flops(module) + work.pallas_flops(traced.jaxpr.jaxpr), traffic.moved(module),
        collectives.read(module, built.mesh.size, sizes.get("dcn", 1)), list(module.unknown),
        time.perf_counter() - start,
    )  # fmt: skip


def name(sizes: dict[str, int]) -> str:
    """Return the sizes of mesh axes in words."""
    return ", ".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1) or "one device"


def dumped(lowered: jax.stages.Lowered) -> tuple[str, Any]:
    """Compile a program, and return its text and the `jax.stages.Compiled`.

    The text is the compiler's own dump, because `as_text` can't read the programs of a libtpu that
    is newer than jaxlib.

    Raises:
      TooLargeError: if the program does not fit a device's memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, str | bool] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        try:
            found = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if used := re.search(_TOO_LARGE, str(error)):
                raise TooLargeError(_bytes(*used.group(1, 2)), _bytes(*used.group(3, 4))) from error
            raise
        (path,) = Path(folder).glob("*after_optimizations.txt")
        return path.read_text(), found


def _bytes(number: str, unit: str) -> float:
    return float(number) * 1024 ** "BKMGT".index(unit)
