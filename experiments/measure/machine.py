"""The machine of the measurements."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import jax

from flax_mha import sharding
from flax_mha.kernels import KERNELS

PACKAGES = (
    "flax_mha", "jax", "jaxlib", "flax", "numpy", "torch", "equinox", "dm-haiku", "keras",
    "tokamax", "fa4-jax",
)  # fmt: skip


def describe() -> dict[str, Any]:
    """Return CPU, load, device, memory and versions."""
    device = jax.devices()[0]
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": cores(),
        "load": os.getloadavg()[0],
        "memory_bytes": _kibibytes("MemTotal"),
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_bytes() -> int | None:
    """Return the memory that a computation may still take, or None if unknown."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return _kibibytes("MemAvailable")
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return None if limit is None else int(limit - stats.get("bytes_in_use", 0))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _kibibytes(key: str) -> int | None:
    value = _field("/proc/meminfo", key)
    return None if value is None else 1024 * int(value.split()[0])


def _field(path: str, key: str) -> str | None:
    if not Path(path).exists():
        return None
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def kernels() -> list[str]:
    """Return the kernels of this machine's platform that take whole sequences."""
    here = sharding.platform()
    return [n for n, k in KERNELS.items() if here in (k.platforms or (here,)) and n != "decode"]
