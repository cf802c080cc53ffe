"""The devices that a topology's name stands for, which need not be there."""

import importlib.util
import math
import re
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from experiments.plan import gpus
from experiments.runs import fields, hosts
from experiments.runs.failures import RunError

TPUS = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x")  # as libtpu calls them


def of(topology: str) -> Sequence[jax.Device]:
    """The devices of a topology.

    | name | devices |
    |---|---|
    | `v5e:16x16`, and others of `TPUS` | those chips, for its compiler alone |
    | `a100:8`, `h100:8`, `h200:64`, `b200:8` | so many GPUs of NVIDIA, for the compiler alone |
    | `cpu:8` | so many, as which the cores of this machine serve |
    | `gpu:8` | so many of the GPUs that are here |

    Raises:
      RunError: if there is no such topology, or nothing that could compile for it.
    """
    known = re.fullmatch(r"(\w+):(\d{1,9}(?:x\d{1,9})*)", topology, re.ASCII)
    chip, sizes = (known[1], [*map(int, known[2].split("x"))]) if known else ("", [])
    one = len(sizes) == 1
    if one and chip in ("cpu", "gpu"):
        return _local(chip, sizes[0])
    if one and chip in gpus.TARGETS:
        return gpus.of(chip, sizes[0])
    if chip not in TPUS or not (min(sizes) and math.prod(sizes) <= gpus.MOST):
        raise RunError(
            f"--topology must be a generation of TPUs and its sizes, such as v5e:16x16, a GPU and "
            f"how many, such as h200:8, or cpu:8 or gpu:8, at most {gpus.MOST:,} devices in all, "
            f"got {topology!r:.100}; TPUs are {', '.join(TPUS)}"
        )
    if not importlib.util.find_spec("libtpu"):
        raise RunError(
            f"--topology={topology} needs the compiler for TPUs, the wheel libtpu (no TPU); "
            f"pip install -e '.[experiments,tpu]'"
        )
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except jax.errors.JaxRuntimeError as error:
        raise RunError(
            f"libtpu refuses --topology={topology}: {error}; it knows such as v5e:16x16, "
            f"v5p:4x4x4, v6e:16x16, tpu7x:4x4x4"
        ) from error
    return described.devices


def _local(platform: str, count: int) -> Sequence[jax.Device]:
    if platform == "cpu" and count:
        hosts.force_host_devices(min(count, fields.DEVICES))
    try:
        found = jax.devices(platform)
    except RuntimeError as error:
        raise RunError(f"--topology={platform}:{count} needs a {platform.upper()}: {error}") from (
            error
        )
    if not 0 < count <= len(found):
        raise RunError(
            f"--topology={platform}:{count} must count at least 1 device, and at most the "
            f"{len(found)} there are"
        )
    return found[:count]


def coordinates(device: jax.Device) -> tuple[int, ...] | None:
    """Where a TPU's chip stands in its torus; None for other devices."""
    coords = getattr(device, "coords", None)
    return None if coords is None else tuple(coords)
