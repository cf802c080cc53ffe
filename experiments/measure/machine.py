"""The machine of the measurements."""

import importlib.metadata
import math
import os
import platform
from pathlib import Path
from typing import Any

import jax

from flax_mha import sharding
from flax_mha.kernels import KERNELS

PACKAGES = ("flax_mha", "jax", "jaxlib", "flax", "torch", "equinox", "tokamax")


def describe() -> dict[str, Any]:
    """Return CPU, device and versions."""
    device, installed = jax.devices()[0], importlib.metadata.distributions()
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": cores(),
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "versions": {one.name: one.version for one in installed if one.name in PACKAGES},
    }


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_bytes() -> float:
    """Return the memory that the system can still give, which is infinite if unknown."""
    free = _field("/proc/meminfo", "MemAvailable")
    return 1024 * int(free.split()[0]) if free else math.inf


def _field(path: str, key: str) -> Any:
    """Return the first value of a key in a file of the kernel's, or None."""
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == key), None)


def kernels() -> list[str]:
    """Return the kernels of this machine's platform that take whole sequences."""
    here = sharding.platform()
    return [n for n, k in KERNELS.items() if here in (k.platforms or (here,)) and n != "decode"]
