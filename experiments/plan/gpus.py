"""NVIDIA GPUs that may be absent, to compile for.

XLA compiles for the description of a chip. The numbers are from XLA's own descriptions
(`xla/backends/gpu/target_config/specs/*.txtpb` of openxla/xla, read in November 2026), except the
version of cuDNN, which is the installed one.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from experiments.common.counts.chips import GPUS
from experiments.common.failures import RunError

MOST = 2**14  # the limit of devices in any topology: more than a pod has
HOST = 8  # GPUs of one machine, connected by NVLink


class Target(NamedTuple):
    """A chip in XLA's terms."""

    name: str  # in NVIDIA's driver, and so in JAX
    major: int  # of its compute capability
    cores: int  # multiprocessors
    fpus: int  # float32 units per multiprocessor
    shared: int  # bytes of shared memory per multiprocessor
    cache: int  # bytes of L2
    clock: float  # GHz

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
    missing = [name for name in NEEDED if not _is_there(name)]
    return f"needs the wheels of the extra gpu-compile, without {missing}" if missing else None


def _is_there(name: str) -> bool:
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
