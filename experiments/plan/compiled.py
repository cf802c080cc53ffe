"""The trainer's own step, compiled for devices that may be absent, and read."""

import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from experiments import tasks
from experiments.counts import traffic, work
from experiments.counts.hlo import Module
from experiments.phases import Phase
from experiments.plan import collectives
from experiments.plan.collectives import Collective
from experiments.runs.checks import shard_bytes
from experiments.trainer import loop, mesh

# libtpu's errors: "the total memory required for … (27.97G) exceeds available HBM (15.75G)", or in
# older versions "Used 27.97G of 15.75G hbm".
_TOO_LARGE = r"([\d.]+)([BKMGT])\)? (?:exceeds available HBM \(|of )([\d.]+)([BKMGT])"


class Memory(NamedTuple):
    """The bytes on one device.

    Attributes:
      parameters: the model's parameters.
      optimizer: moments and counts.
      batch: a batch, keys, and the padding of all arguments' layouts.
      activations: everything that lives within a step, including gradients and gathered parameters.
      peak: arguments and everything alive beside them, by the compiler. Results replace arguments.
    """

    parameters: int
    optimizer: int
    batch: int
    activations: int
    peak: int


class Compiled(NamedTuple):
    """A compiled step of one layout. Bytes and operations are per device.

    Attributes:
      sizes: the sizes of the mesh axes.
      devices: the mesh's devices, in its order.
      memory: the memory of a device, by kind.
      flops: the operations of matmuls, see `work`.
      moved: the bytes to and from memory, see `traffic`.
      sent: the collectives.
      unknown: loops of unknown trip count; they count as run once.
      seconds: the compile time.
      depths: the numbers of layers that were compiled, if the figures extrapolate from them.
    """

    sizes: dict[str, int]
    devices: Sequence[jax.Device]
    memory: Memory
    flops: int
    moved: int
    sent: list[Collective]
    unknown: list[str]
    seconds: float
    depths: tuple[int, ...] = ()


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
    state, batch = built.abstract_state(), built.abstract_batch()
    layers = config.model.get("num_layers")
    with mesh.on(built.mesh):
        with Phase("tracing the step", aloud=False):
            traced = built.step.trace(state, batch)  # type: ignore[attr-defined]
            lowered = traced.lower()
        over = ", ".join(f"{axis}={n}" for axis, n in built.mesh.shape.items() if n > 1)
        with Phase(f"compiling {layers or 'all'} layers, {over or 'one device'}", aloud=False):
            text, found = dumped(lowered)
    module = Module(text)
    stats: Any = found.memory_analysis()
    held = stats.argument_size_in_bytes
    parameters, optimizer = map(shard_bytes, (state.params, state.opt_state))
    produced = stats.output_size_in_bytes - stats.alias_size_in_bytes
    memory = Memory(
        parameters, optimizer, held - parameters - optimizer, stats.temp_size_in_bytes,
        held + produced + stats.temp_size_in_bytes,
    )  # fmt: skip
    return Compiled(
        dict(built.mesh.shape), list(built.mesh.devices.flat), memory,
        work.flops(module) + work.pallas_flops(traced.jaxpr.jaxpr), traffic.moved(module),
        collectives.read(module, built.mesh.size, built.mesh.shape.get("dcn", 1)),
        list(module.unknown),
        time.perf_counter() - start,
    )  # fmt: skip


def dumped(lowered: jax.stages.Lowered) -> tuple[str, jax.stages.Compiled]:
    """Compile a program, and return its text and the result.

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
