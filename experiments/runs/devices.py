"""The devices of a mesh, on one TPU slice, on several, or elsewhere."""

import math
from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh
from ml_collections import ConfigDict

from experiments.runs import checks

AXES = ("data", "fsdp", "model", "context")  # of the mesh


def count_slices(devices: Sequence[jax.Device]) -> int:
    """Return the number of TPU slices that a data center's network connects; 1 elsewhere."""
    if devices[0].platform != "tpu":
        return 1
    return len({getattr(device, "slice_index", 0) for device in devices})


def make_mesh(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a (data, fsdp, model, context) mesh of these devices (default: all there are).

    If heads divide over some of context's devices only, these are a fifth axis, ulysses, within
    context. Attention can then shard heads over it (`usp`). Several slices have a mesh of these
    sizes each, along a first axis `dcn`.
    """
    devices = jax.devices() if devices is None else devices
    slices = count_slices(devices)
    sizes: tuple[int, ...] = checks.mesh_sizes(config, len(devices) // slices, slices)
    names: tuple[str, ...] = AXES
    context, model = sizes[3], config.model
    heads = math.gcd(model.num_heads, model.get("num_kv_heads", 0)) // sizes[2]
    ulysses = math.gcd(heads, context)
    if 1 < ulysses < context:
        names, sizes = (*AXES, "ulysses"), (*sizes[:3], context // ulysses, ulysses)
    return _place(names, sizes, devices, slices)


def _place(
    names: tuple[str, ...], sizes: tuple[int, ...], devices: Sequence[jax.Device], slices: int
) -> Mesh:
    """Return a mesh of these axes, of neighboring devices where possible.

    Several slices have a mesh of these sizes each, along a first axis `dcn`.
    """
    count = math.prod(sizes)
    # `jax.make_mesh` refuses sizes that are no products of those of the chips' torus.
    if slices == 1:
        placed = mesh_utils.create_device_mesh(
            sizes, devices[:count], allow_split_physical_axes=True
        )
        return Mesh(placed, names, axis_types=(AxisType.Auto,) * len(names))
    by_slice: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_slice.setdefault(device.slice_index, []).append(device)
    used = [device for part in by_slice.values() for device in part[:count]]
    placed = mesh_utils.create_hybrid_device_mesh(
        (1, *sizes), (slices, *(1 for _ in names)), used, allow_split_physical_axes=True
    )
    return Mesh(placed, ("dcn", *names), axis_types=(AxisType.Auto,) * (1 + len(names)))
