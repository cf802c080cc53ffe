"""The wheel libtpu where no TPU is: a compiler that must neither look for one nor complain.

JAX asks it for a TPU wherever it is installed, and it answers with several lines of errors, after a
search in the network for the host of one. This is called before JAX looks for devices.
"""

import os
from pathlib import Path

# A host that stands for itself alone, so that it asks nobody; any kind of chip will do, for what is
# compiled says by itself which chips it is for.
_QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several compilers at a time
}
_GOOGLE = "0x1ae0"
_STORAGE, _NETWORK = "0x01", "0x02"  # classes of devices that every virtual machine there has


def compiler_only(devices: Path = Path("/sys/bus/pci/devices")) -> None:
    """Keep libtpu quiet on a machine without a TPU, and change nothing on one that has one."""
    if not any(_is_tpu(device) for device in devices.glob("*")):
        quiet()


def quiet() -> None:
    """Keep libtpu quiet, in a program that leaves a TPU alone."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


def _is_tpu(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor == _GOOGLE and not kind.startswith((_STORAGE, _NETWORK))
