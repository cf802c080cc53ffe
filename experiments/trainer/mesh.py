"""The mesh of a run, and its program on it: one jitted step for any task, seeds and devices."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import grain
import grain.experimental
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from experiments.runs.failures import RunError
from experiments.tasks.task import Batch, Metrics, Params, Task
from flax_mha import sharding

AXES = ("data", "fsdp", "model", "context")


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
class Program:
    """The jitted functions of a run, and the placement of its arrays on the mesh.

    Attributes:
      shardings: the shardings of the state.
      create: a function from `seeds` to a state.
      step: a function from a state and a batch to the next state and metrics.
      evaluate: a function from parameters and a test batch to sums of metrics.
    """

    config: ConfigDict
    task: Task
    mesh: Mesh
    shardings: Any
    create: Callable[[jax.Array], Any]
    step: Callable[[Any, Batch], tuple[Any, Metrics]]
    evaluate: Callable[[Params, Batch], Metrics]

    def on_mesh(self) -> contextlib.AbstractContextManager[None]:
        """Make the mesh and the sharding rules ambient."""
        return on(self.mesh)

    @property
    def seeds(self) -> jax.Array:
        """The argument of `create`: a seed, or [seeds] of them."""
        first, count = self.config.seed, self.config.seeds
        return jnp.uint32(first) if count == 1 else jnp.arange(first, first + count, dtype="uint32")

    def abstract_state(self) -> Any:
        """Return shapes, dtypes and shardings of the state."""
        shapes = jax.eval_shape(self.create, self.seeds)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self.shardings
        )

    def abstract_batch(self) -> Any:
        """Return shapes, dtypes and shardings of a training batch."""
        row = next(iter(self.task.batches(self.config.seed, 1, np.arange(1))))
        seeds = (self.config.seeds,) if self.config.seeds > 1 else ()
        shape, over = (*seeds, self.config.batch_size), self._over_batch(len(seeds))
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*shape, *x.shape[1:]), x.dtype, sharding=over), row
        )

    def put_params(self, params: Params) -> Params:
        """Return parameters of one model, for each seed, placed as those of the state."""
        seeds = (self.config.seeds,) * (self.config.seeds > 1)
        expected = self.abstract_state().params

        def place(x: Any, target: jax.ShapeDtypeStruct) -> jax.Array:
            x = np.broadcast_to(np.asarray(x, target.dtype), (*seeds, *np.shape(x)))
            if x.shape != target.shape:
                raise RunError(
                    f"--weights must be of a run with the same model, got an array {x.shape} for "
                    f"{target.shape}; give another run, or the same config.model"
                )
            return jax.device_put(x, target.sharding)

        return jax.tree.map(place, params, expected)

    def batches(self) -> grain.DatasetIterator:
        """Return this process's rows of the training batches, [seeds, rows, ...] if several."""
        size = self.config.batch_size
        spans = self._over_batch(0).addressable_devices_indices_map((size,)).values()
        # On a pod they need not be neighbors: the mesh follows the wires between the devices.
        rows = np.unique([np.arange(size)[index] for index in spans])
        seeds = range(self.config.seed, self.config.seed + self.config.seeds)
        streams = [self.task.batches(seed, size, rows) for seed in seeds]
        if len(streams) == 1:
            return iter(streams[0])
        together = grain.experimental.ZipIterDataset(streams)
        return iter(together.map(lambda each: jax.tree.map(lambda *x: np.stack(x), *each)))

    def put(self, local: Any) -> Any:
        """Return a training batch as global arrays, from the rows of each process."""
        axis = int(self.config.seeds > 1)

        def place(x: np.ndarray) -> jax.Array:
            shape = (*x.shape[:axis], self.config.batch_size, *x.shape[axis + 1 :])
            return jax.make_array_from_process_local_data(self._over_batch(axis), x, shape)

        return jax.tree.map(place, local)

    def put_test(self, batch: Any) -> Any:
        """Return a test batch as global arrays, padded (with weight 0) to split evenly."""
        parts = self.mesh.size // (self.mesh.shape["model"] * self.mesh.shape["context"])

        def place(x: np.ndarray) -> jax.Array:
            x = np.pad(x, [(0, -len(x) % parts), *[(0, 0)] * (x.ndim - 1)])
            return jax.make_array_from_callback(x.shape, self._over_batch(0), lambda i: x[i])

        return jax.tree.map(place, batch)

    def _over_batch(self, axis: int) -> NamedSharding:
        spec = nn.logical_to_mesh_axes((*[None] * axis, "batch"), rules(self.mesh))
        return NamedSharding(self.mesh, spec or PartitionSpec())


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
        config, task, mesh, shardings,
        create=jax.jit(over_seeds(create), out_shardings=shardings),
        step=jax.jit(over_seeds(step), donate_argnums=0, out_shardings=(shardings, everywhere)),
        evaluate=jax.jit(over_seeds(task.evaluate, in_axes=(0, None)), out_shardings=everywhere),
    )  # fmt: skip
