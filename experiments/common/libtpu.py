"""Quiet the wheel libtpu on machines without a TPU, where it is only a compiler.

JAX asks libtpu for a TPU wherever it is installed. Without one it searches the network for a host
and prints several lines of errors. Call this before JAX looks for devices.
"""

import os
from pathlib import Path

# A single host, so that libtpu asks no other one. Any kind of chip will do, because a compiled
# program names its own chips.
_QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several compilers at a time
}
_GOOGLE = "0x1ae0"
_STORAGE, _NETWORK = "0x01", "0x02"  # device classes that every Google virtual machine has


def compiler_only(devices: Path = Path("/sys/bus/pci/devices")) -> None:
    """Keep libtpu quiet on a machine without a TPU, and change nothing on one with a TPU."""
    if not any(_is_tpu(device) for device in devices.glob("*")):
        quiet()


def quiet() -> None:
    """Keep libtpu quiet, in a program that uses no TPU."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


def _is_tpu(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor == _GOOGLE and not kind.startswith((_STORAGE, _NETWORK))
