"""The devices of a run: simulated ones on a CPU, and their mesh."""

import math
import os
from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh
from ml_collections import ConfigDict

from experiments.common.failures import RunError

AXES = ("data", "fsdp", "model", "context")


def force_host_devices(count: int) -> int:
    """Make a number of CPU devices of this host's cores, unless the environment sets it.

    Args:
      count: the CPU devices of this process; 0 leaves them as they are.

    Returns:
      The number that was made; 0 for none.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if not count or "host_platform_device" in flags or "JAX_NUM_CPU_DEVICES" in os.environ:
        return 0
    jax.config.update("jax_num_cpu_devices", count)
    # Threads for XLA: with those of few cores, many devices can wait for each other for ever.
    os.environ.setdefault("NPROC", str(4 * count))
    return count


def count_slices(devices: Sequence[jax.Device]) -> int:
    """Return the number of TPU slices that a data center's network connects; 1 elsewhere."""
    if devices[0].platform != "tpu":
        return 1
    return len({getattr(device, "slice_index", 0) for device in devices})


def mesh_sizes(config: ConfigDict, have: int, slices: int = 1) -> tuple[int, int, int, int]:
    """Return the sizes of `AXES`, for this number of devices in each slice.

    With data=-1 the mesh takes all devices, or on one process the most that split the batch evenly.
    """
    m, rows, processes = config.mesh, config.batch_size, jax.process_count()
    data, fsdp, model, context = m.data, m.fsdp, m.model, m.context
    if data == -1 and min(fsdp, model, context) >= 1:
        data = max(1, have // (fsdp * model * context))
        # Several processes all have to take part, so that the batch has to fit them.
        while processes == 1 and data > 1 and rows % (slices * data * fsdp):
            data -= 1
    sizes = (data, fsdp, model, context)
    got = f"data={m.data}, fsdp={fsdp}, model={model}, context={context}"
    if min(sizes) < 1 or math.prod(sizes) > have:
        raise RunError(
            f"config.mesh needs data·fsdp·model·context devices, at least 1 and at most the {have} "
            f"there are, got {got}; on a CPU, config.mesh.force_host_devices=N makes N of them"
        )
    if processes > 1 and math.prod(sizes) != have:
        raise RunError(
            f"with {processes} processes config.mesh must use all {have} devices, got {got}; "
            f"try data={have // (fsdp * model * context)}"
        )
    parts = slices * data * fsdp
    if rows % parts:
        over = f", times {slices} slices" if slices > 1 else ""
        raise RunError(
            f"config.batch_size must be a multiple of config.mesh.data={data} times "
            f"config.mesh.fsdp={fsdp}{over}, got {rows}; try {-(-rows // parts) * parts}"
        )
    return sizes


def make_mesh(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh of these devices (default: all there are), neighbors next to each other.

    If heads divide over some of context's devices only, these are a fifth axis, ulysses, within
    context. Attention can then shard heads over it (`usp`). Several slices have a mesh of these
    sizes each, along a first axis `dcn`.
    """
    devices = jax.devices() if devices is None else devices
    slices, model = count_slices(devices), config.model
    names: tuple[str, ...] = AXES
    sizes: tuple[int, ...] = mesh_sizes(config, len(devices) // slices, slices)
    heads = math.gcd(model.num_heads, model.get("num_kv_heads", 0)) // sizes[2]
    ulysses = math.gcd(heads, sizes[3])
    if 1 < ulysses < sizes[3]:
        names, sizes = (*AXES, "ulysses"), (*sizes[:3], sizes[3] // ulysses, ulysses)
    count = math.prod(sizes)
    # `jax.make_mesh` refuses sizes that are no products of those of the chips' torus.
    if slices == 1:
        placed = mesh_utils.create_device_mesh(
            sizes, devices[:count], allow_split_physical_axes=True
        )
    else:
        by_slice: dict[int, list[jax.Device]] = {}
        for device in devices:
            by_slice.setdefault(device.slice_index, []).append(device)
        used = [device for part in by_slice.values() for device in part[:count]]
        placed = mesh_utils.create_hybrid_device_mesh(
            (1, *sizes), (slices, *(1 for _ in names)), used, allow_split_physical_axes=True
        )
        names = ("dcn", *names)
    return Mesh(placed, names, axis_types=(AxisType.Auto,) * len(names))
