"""The mesh of a run, and its program on it: one jitted step for any task, seeds and devices."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from experiments.runs import checks
from experiments.runs.placement import Placement
from experiments.tasks.task import Batch, Metrics, Params, Task
from flax_mha import sharding

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
    by_slice: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_slice.setdefault(getattr(device, "slice_index", 0), []).append(device)
    used = [device for part in by_slice.values() for device in part[: int(np.prod(sizes))]]
    # `jax.make_mesh` refuses sizes that are no products of those of the chips' torus.
    if slices == 1:
        placed = mesh_utils.create_device_mesh(
            sizes, used[: int(np.prod(sizes))], allow_split_physical_axes=True
        )
    else:
        placed = mesh_utils.create_hybrid_device_mesh(
            (1, *sizes), (slices, *(1 for _ in names)), used,
            allow_split_physical_axes=True,
        )  # fmt: skip
        names = ("dcn", *names)
    return Mesh(placed, names, axis_types=(AxisType.Auto,) * len(names))


def rules(mesh: Mesh) -> tuple[tuple[str, Any], ...]:
    """Return the mesh axes of each logical axis.

    The first rule whose axes are free wins. Rows of the batch go over dcn, data and fsdp. The
    features of each parameter, and so of its gradient and moments, go over fsdp too: XLA gathers a
    layer's parameters where it needs them. The positions of every row go over context and ulysses:
    attention alone needs the keys and values of others.
    """
    over: tuple[tuple[str, Any], ...] = ()
    slices = ("dcn",) * ("dcn" in mesh.shape)
    if mesh.shape["fsdp"] > 1:
        over += (("batch", (*slices, "data", "fsdp")), ("embed", "fsdp"))
    elif slices:
        over += (("batch", (*slices, "data")),)
    if mesh.shape["context"] > 1:
        along = ("context", "ulysses") if "ulysses" in mesh.shape else "context"
        over += (("length", along), ("norm_length", along))
    return (*over, *sharding.RULES)


@contextlib.contextmanager
def on(mesh: Mesh) -> Iterator[None]:
    """Make the mesh and the sharding rules ambient."""
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules(mesh)):
        yield


@dataclasses.dataclass(frozen=True)
class Program(Placement):
    """The jitted functions of a run, beside the placement of its arrays on the mesh."""

    step: Callable[[Any, Batch], tuple[Any, Metrics]]
    evaluate: Callable[[Params, Batch], Metrics]

    def on_mesh(self) -> contextlib.AbstractContextManager[None]:
        """Make the mesh and the sharding rules ambient."""
        return on(self.mesh)


def build(
    config: ConfigDict, task: Task, create: Any, step: Any, devices: Sequence[jax.Device] | None
) -> Program:
    """Return the program of a run: `create` and `step` of a single seed, jitted for its mesh."""
    mesh, several = make_mesh(config, devices), config.seeds > 1
    over_seeds: Callable[..., Any] = jax.vmap if several else lambda f, **_: f
    with on(mesh):
        shardings = sharding.of(create, jax.ShapeDtypeStruct((), jnp.uint32))
    # The logical names are those of one model; the axis of the seeds stays whole.
    shardings = jax.tree.map(
        lambda s: NamedSharding(mesh, PartitionSpec(*[None] * several, *s.spec)), shardings
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    return Program(
        config, task, mesh, rules(mesh), shardings,
        create=jax.jit(over_seeds(create), out_shardings=shardings),
        step=jax.jit(over_seeds(step), donate_argnums=0, out_shardings=(shardings, everywhere)),
        evaluate=jax.jit(over_seeds(task.evaluate, in_axes=(0, None)), out_shardings=everywhere),
    )  # fmt: skip
