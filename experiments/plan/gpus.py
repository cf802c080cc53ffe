"""NVIDIA's GPUs that need not be here: devices to compile for, and the links between them.

XLA is told of a chip what its compiler goes by. The numbers are those of XLA's own descriptions
(`xla/backends/gpu/target_config/specs/*.txtpb` of openxla/xla, read in November 2026), but for the
version of cuDNN, which is the one that is installed.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies

from experiments.counts.chips import GPUS, Gpu
from experiments.plan.collectives import Collective
from experiments.runs.failures import RunError

MOST = 2**14  # devices of any topology: more than a pod has
HOST = 8  # GPUs with NVLink to each other: those of one machine


class Target(NamedTuple):
    """A chip in XLA's terms.

    Attributes:
      name: what NVIDIA's driver, and so JAX, calls it.
      major: of its compute capability.
      cores: multiprocessors.
      fpus: float32 units of each.
      shared: bytes of shared memory of each.
      cache: bytes of its L2 cache.
      clock: GHz.
    """

    name: str
    major: int
    cores: int
    fpus: int
    shared: int
    cache: int
    clock: float

    def text(self) -> str:
        """A `stream_executor.GpuTargetConfigProto`, in the text form."""
        gpu = GPUS[self.name]
        return f"""
            gpu_device_info {{
              cuda_compute_capability {{ major: {self.major} }}
              core_count: {self.cores}
              fpus_per_core: {self.fpus}
              shared_memory_per_core: {self.shared}
              shared_memory_per_block_optin: {self.shared - 1024}
              shared_memory_per_block: 49152
              l2_cache_size: {self.cache}
              clock_rate_ghz: {self.clock}
              memory_bandwidth: {gpu.bandwidth:.0f}
              device_memory_size: {gpu.memory:.0f}
              threads_per_warp: 32
              threads_per_block_limit: 1024
              threads_per_core_limit: 2048
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              thread_dim_limit_x: 1024
              thread_dim_limit_y: 1024
              thread_dim_limit_z: 64
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 patch: 2 }}
            device_description_str: "{self.name}"
        """


TARGETS = {
    "a100": Target("NVIDIA A100-SXM4-80GB", 8, 108, 64, 167936, 41943040, 1.41),
    "h100": Target("NVIDIA H100 80GB HBM3", 9, 132, 128, 233472, 52428800, 1.98),
    "h200": Target("NVIDIA H200", 9, 132, 128, 233472, 52428800, 1.98),
    "b200": Target("NVIDIA B200", 10, 148, 128, 233472, 132644864, 1.965),
}
NEEDED = ("jax_plugins.xla_cuda13", "nvidia.cudnn")


def lacking() -> str | None:
    """The wheels that compiling for NVIDIA's GPUs needs and that are not here, or None."""
    missing = [name for name in NEEDED if not _there(name)]
    return f"needs the wheels of the extra gpu-compile, without {missing}" if missing else None


def _there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def of(chip: str, count: int) -> Sequence[jax.Device]:
    """So many GPUs, in machines of 8, for the compiler alone.

    Raises:
      RunError: if they do not fill machines, or nothing here can compile for them.
    """
    if not count or count > MOST or (count > HOST and count % HOST):
        raise RunError(f"--topology={chip}:{count} must count 1 to {HOST} GPUs, or machines of "
                       f"{HOST}: {HOST * max(1, round(min(count, MOST) / HOST))}")  # fmt: skip
    if reason := lacking():
        raise RunError(
            f"--topology={chip}:{count} {reason} (no GPU); "
            f"pip install -e '.[experiments,gpu-compile]'"
        )
    here = min(count, HOST)
    described: Any = topologies.get_topology_desc(
        chip, "cuda", target_config=TARGETS[chip].text(), topology=f"1x{count // here}x{here}"
    )
    return described.devices


class Machines(NamedTuple):
    """GPUs and the links between them.

    Attributes:
      chip: what one can do.
      hosts: the machine of each device of the mesh, in its order.
    """

    chip: Gpu
    hosts: np.ndarray
    cores: int = 1

    @classmethod
    def of(cls, devices: Sequence[jax.Device]) -> "Machines | None":
        """Those of a mesh; None where the table of chips lacks them."""
        if devices[0].device_kind not in GPUS:
            return None
        hosts = np.array([device.id // HOST for device in devices])
        return cls(GPUS[devices[0].device_kind], hosts)

    @property
    def memory(self) -> float:
        """Bytes of a device's memory."""
        return self.chip.memory

    def seconds(self, one: Collective) -> float:
        """The least time of a collective, once.

        Every device has its own link to the switch of its machine, and its own to the network: what
        it sends over either at that link's speed. Of a group over n machines, g devices in each, a
        sum goes within the machines first, and then each device sends 1/g of what it holds; what is
        sent from each to each crosses the network in the part that other machines have.
        """
        if one.kind == "collective-permute":
            apart = self.hosts[one.groups[:, 0]] != self.hosts[one.groups[:, 1]]
            return one.bytes / (self.chip.network if apart.any() else self.chip.link)
        members = self.hosts[one.groups[0]]
        inside = one.sent / self.chip.link
        machines = len(set(members))
        if machines == 1:
            return inside
        each = 1 if one.kind.endswith("all-to-all") else len(members) / machines
        share = (1 - 1 / machines) / (1 - 1 / len(members))
        return max(inside, one.sent * share / each / self.chip.network)
