"""NVIDIA GPUs that may be absent: devices to compile for, and the links between them.

XLA compiles for the description of a chip. The numbers are from XLA's own descriptions
(`xla/backends/gpu/target_config/specs/*.txtpb` of openxla/xla, read in November 2026), except the
version of cuDNN, which is the installed one.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies

from experiments.counts.chips import GPUS, Chip
from experiments.plan.collectives import Collective
from experiments.runs.failures import RunError

MOST = 2**14  # the limit of devices in any topology: more than a pod has
HOST = 8  # GPUs of one machine, connected by NVLink


class Target(NamedTuple):
    """A chip in XLA's terms.

    Attributes:
      name: its name in NVIDIA's driver, and so in JAX.
      major: the major number of its compute capability.
      cores: the number of multiprocessors.
      fpus: the float32 units per multiprocessor.
      shared: the bytes of shared memory per multiprocessor.
      cache: the bytes of its L2 cache.
      clock: the clock rate in GHz.
    """

    name: str
    major: int
    cores: int
    fpus: int
    shared: int
    cache: int
    clock: float

    def text(self) -> str:
        """Return the text form of a `stream_executor.GpuTargetConfigProto`."""
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
    """Return the missing wheels for compiling to NVIDIA GPUs as a reason, or None."""
    missing = [name for name in NEEDED if not _there(name)]
    return f"needs the wheels of the extra gpu-compile, without {missing}" if missing else None


def _there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def of(chip: str, count: int) -> Sequence[jax.Device]:
    """Return GPUs in machines of 8, for the compiler only."""
    if not count or count > MOST or (count > HOST and count % HOST):
        raise RunError(f"--topology={chip}:{count} must be 1 to {HOST} GPUs, or a multiple of "
                       f"{HOST}; try {HOST * max(1, round(min(count, MOST) / HOST))}")  # fmt: skip
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
      chip: the constants of one GPU.
      hosts: the machine of each device of the mesh, in its order.
      cores: the devices per GPU.
    """

    chip: Chip
    hosts: np.ndarray
    cores: int = 1

    @classmethod
    def of(cls, devices: Sequence[jax.Device]) -> "Machines | None":
        """Return the machines of a mesh, or None if the table of chips lacks them."""
        if devices[0].device_kind not in GPUS:
            return None
        hosts = np.array([device.id // HOST for device in devices])
        return cls(GPUS[devices[0].device_kind], hosts)

    @property
    def memory(self) -> float:
        """The bytes of a device's memory."""
        return self.chip.memory

    def by_link(self, one: Collective) -> dict[str, float]:
        """Return the bytes that each device sends over each kind of link in one run."""
        across = one.across(self.hosts)
        alone = len(set(self.hosts[one.groups[0]])) == one.groups.shape[1]
        inside = 0.0 if across and alone else one.sent
        sent = {"NVLink": inside, "InfiniBand": across}
        return {link: size for link, size in sent.items() if size}

    def seconds(self, one: Collective) -> float:
        """Return the minimum time of one run of a collective.

        Every device has its own link to its machine's switch and its own to the network, and sends
        over both at the same time.
        """
        return max((x / self.speed(link) for link, x in self.by_link(one).items()), default=0.0)

    def speed(self, link: str) -> float:
        """Return the bytes per second of a kind of link, one way."""
        return self.chip.link if link == "NVLink" else self.chip.network
