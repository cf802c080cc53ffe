"""The devices of a named topology, which may be absent."""

import importlib.util
import math
import re
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from experiments.common.devices import force_host_devices
from experiments.common.failures import RunError
from experiments.plan import gpus

TPUS = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x")  # libtpu's names
SIMULATED = 512  # devices that a CPU can simulate: beyond, the threads of XLA run out


def of(topology: str) -> Sequence[jax.Device]:
    """Return the devices of a topology.

    | name | devices |
    |---|---|
    | `v5e:16x16`, and others of `TPUS` | these chips, for the compiler only |
    | `2xv5e:16x16` | two such slices, connected by the data center's network |
    | `a100:8`, `h100:8`, `h200:64`, `b200:8` | this number of NVIDIA GPUs, for the compiler only |
    | `cpu:8` | 8 devices simulated on the cores of this machine |
    """
    known = re.fullmatch(r"(?:(\d{1,9})x)?(\w+):(\d{1,9}(?:x\d{1,9})*)", topology, re.ASCII)
    chip, sizes = (known[2], [*map(int, known[3].split("x"))]) if known else ("", [])
    slices = int(known[1] or 1) if known else 1
    if len(sizes) == slices == 1 and chip == "cpu":
        return _simulated(sizes[0])
    if len(sizes) == slices == 1 and chip in gpus.TARGETS:
        return gpus.of(chip, sizes[0])
    if chip not in TPUS or not 0 < slices * math.prod(sizes) <= gpus.MOST:
        raise RunError(
            f"--topology must be a generation of TPUs and its sizes, such as v5e:16x16, GPUs and "
            f"their number, such as h200:8, or cpu:8, with at most {gpus.MOST:,} devices, got "
            f"{topology!r:.100}; choose a TPU of {', '.join(TPUS)}, or slices: 2xv5e:16x16"
        )
    if not importlib.util.find_spec("libtpu"):
        raise RunError(
            f"--topology={topology} needs the compiler for TPUs, the wheel libtpu (no TPU); "
            f"pip install -e '.[experiments,tpu]'"
        )
    several = {"num_slices": slices} if slices > 1 else {}
    name = topology.removeprefix(f"{slices}x")
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=name, **several)
    except jax.errors.JaxRuntimeError as error:
        raise RunError(
            f"libtpu refuses --topology={topology}: {error}; try one such as v5e:16x16, "
            f"v5p:4x4x4, v6e:16x16 or tpu7x:4x4x4"
        ) from error
    return described.devices


def _simulated(count: int) -> Sequence[jax.Device]:
    force_host_devices(min(count, SIMULATED))
    found = jax.devices("cpu")
    if not 0 < count <= len(found):
        raise RunError(
            f"--topology=cpu:{count} must be at least 1 device, and at most the {len(found)} "
            f"available ones"
        )
    return found[:count]
