"""What a run executes: one jitted step for any task, any number of seeds, any mesh."""

import contextlib
import dataclasses
import math
import os
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
from experiments.tasks.task import Batch, Params, Task
from flax_mha import sharding

AXES = ("data", "fsdp", "model", "context")  # of the mesh
Metrics = dict[str, Any]  # each of shape [seeds]


def make_mesh(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A (data, fsdp, model, context) mesh of the sizes in config.mesh.

    With data=-1 it takes all devices it can use: all there are, or on one process those that split
    the batch evenly.

    Args:
      config: of the run.
      devices: those there are (default: this run's own).

    Raises:
      RunError: if devices, processes, batch and sizes do not fit together.
    """
    data, fsdp, model, context = (config.mesh[axis] for axis in AXES)
    devices = jax.devices() if devices is None else devices
    have, processes, rows = len(devices), jax.process_count(), config.batch_size
    if data == -1 and min(fsdp, model, context) >= 1:
        most = max(1, have // (fsdp * model * context))
        fits = (n for n in range(1, most + 1) if rows % (n * fsdp) == 0)
        # Every process has to take part, so that there several the batch has to fit.
        data = most if processes > 1 else max(fits, default=1)
    sizes = (data, fsdp, model, context)
    got = ", ".join(f"{axis}={config.mesh[axis]}" for axis in AXES)
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
    if rows % (data * fsdp):
        raise RunError(
            f"config.batch_size must be a multiple of config.mesh.data={data} times "
            f"config.mesh.fsdp={fsdp}, got {rows}; try {-(-rows // (data * fsdp)) * data * fsdp}"
        )
    kinds = (AxisType.Auto,) * len(AXES)
    # `jax.make_mesh` refuses sizes that are no products of those of the chips' torus.
    placed = mesh_utils.create_device_mesh(
        sizes, devices[: math.prod(sizes)], allow_split_physical_axes=True
    )
    return Mesh(placed, AXES, axis_types=kinds)


def rules(mesh: Mesh) -> tuple[tuple[str, Any], ...]:
    """Which logical axis goes to which mesh axes; the first rule that is free wins.

    Over fsdp go the rows of the batch, like over data, and the features of each parameter, and so
    of its gradient and moments: XLA gathers a layer's parameters where it needs them. Over context
    go the positions of every row: only attention needs those of other devices, their keys and
    values.
    """
    over: tuple[tuple[str, Any], ...] = ()
    if mesh.shape["fsdp"] > 1:
        over += (("batch", ("data", "fsdp")), ("embed", "fsdp"))
    if mesh.shape["context"] > 1:
        over += (("length", "context"), ("norm_length", "context"))
    return (*over, *sharding.RULES)


@contextlib.contextmanager
def on(mesh: Mesh) -> Iterator[None]:
    """Makes the mesh and the sharding rules ambient."""
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules(mesh)):
        yield


@dataclasses.dataclass(frozen=True)
class Program:
    """What a run executes, on the ambient mesh."""

    config: ConfigDict
    task: Task
    mesh: Mesh
    shardings: Any
    create: Callable[[jax.Array], Any]
    step: Callable[[Any, Batch], tuple[Any, Metrics]]
    evaluate: Callable[[Params, Batch], Metrics]

    def on_mesh(self) -> contextlib.AbstractContextManager[None]:
        """Makes its mesh and the sharding rules ambient."""
        return on(self.mesh)

    @property
    def seeds(self) -> jax.Array:
        """What `create` takes: a number, or [seeds] of them."""
        first, count = self.config.seed, self.config.seeds
        return jnp.uint32(first) if count == 1 else jnp.arange(first, first + count, dtype="uint32")

    def abstract_state(self) -> Any:
        """Shapes, dtypes and shardings of the state."""
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            jax.eval_shape(self.create, self.seeds), self.shardings,
        )  # fmt: skip

    def check(self) -> None:
        """Check that state and batch fit the memory, and a step these devices, without running it.

        Raises:
          ValueError: if they do not.
        """
        state, batch, here = self.abstract_state(), self.abstract_batch(), self.mesh.local_devices
        needed = shard_bytes((state.params, state.opt_state, batch))
        available = (here[0].memory_stats() or {}).get("bytes_limit")
        if here[0].platform == "cpu":  # All devices share it.
            needed *= len(here)
            available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if available is not None and needed > available:
            raise RunError(
                f"parameters, optimizer and a batch must fit the memory of {available / 2**30:.1f} "
                f"GiB, got {needed / 2**30:,.1f} GiB; try smaller sizes of config.model, or a "
                f"smaller config.batch_size"
            )
        with self.on_mesh():
            jax.eval_shape(self.step, state, batch)

    def abstract_batch(self) -> Batch:
        """Shapes, dtypes and shardings of a training batch."""
        axis, size = int(self.config.seeds > 1), self.config.batch_size
        row = next(iter(self.task.batches(self.config.seed, 1, np.arange(1))))
        seeds = (self.config.seeds,) * axis
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (*seeds, size, *x.shape[1:]), x.dtype, sharding=self._over_batch(axis)
            ),
            row,
        )

    def batches(self) -> grain.DatasetIterator:
        """This process's rows of the training batches, [seeds, rows, ...] if seeds are several."""
        size = self.config.batch_size
        spans = self._over_batch(0).addressable_devices_indices_map((size,)).values()
        # On a pod they need not be neighbours: the mesh follows the wires between the devices.
        rows = np.unique([np.arange(size)[index] for index in spans])
        seeds = range(self.config.seed, self.config.seed + self.config.seeds)
        streams = [self.task.batches(seed, size, rows) for seed in seeds]
        if len(streams) == 1:
            return iter(streams[0])
        together = grain.experimental.ZipIterDataset(streams)
        return iter(together.map(lambda each: jax.tree.map(lambda *x: np.stack(x), *each)))

    def put(self, local: Batch) -> Batch:
        """A training batch as global arrays, from the rows of each process."""
        axis = int(self.config.seeds > 1)

        def place(x: np.ndarray) -> jax.Array:
            shape = (*x.shape[:axis], self.config.batch_size, *x.shape[axis + 1 :])
            return jax.make_array_from_process_local_data(self._over_batch(axis), x, shape)

        return jax.tree.map(place, local)

    def put_test(self, batch: Batch) -> Batch:
        """A test batch as global arrays, padded (with weight 0) to split evenly."""
        parts = self.mesh.shape["data"] * self.mesh.shape["fsdp"]

        def place(x: np.ndarray) -> jax.Array:
            x = np.pad(x, [(0, -len(x) % parts), *[(0, 0)] * (x.ndim - 1)])
            return jax.make_array_from_callback(x.shape, self._over_batch(0), lambda i: x[i])

        return jax.tree.map(place, batch)

    def _over_batch(self, axis: int) -> NamedSharding:
        spec = nn.logical_to_mesh_axes((*[None] * axis, "batch"), rules(self.mesh))
        return NamedSharding(self.mesh, spec or PartitionSpec())


def shard_bytes(tree: Any) -> int:
    """Bytes of the shards that one device holds of a tree of arrays with shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize
        for x in jax.tree.leaves(tree)
    )


def build(
    config: ConfigDict,
    task: Task,
    create: Callable[..., Any],
    step: Callable[..., Any],
    devices: Sequence[jax.Device] | None = None,
) -> Program:
    """Jits the program of a run, which is to be run under `program.on_mesh()`.

    Args:
      config: of the run.
      task: that it names.
      create: a state of a seed.
      step: a state and metrics of a state and a batch, for a single seed.
      devices: those of the mesh (default: all there are).

    Raises:
      ValueError: if the config does not fit itself, the devices or the model.
    """
    mesh = make_mesh(config, devices)
    several = config.seeds > 1
    over_seeds: Callable[..., Any] = jax.vmap if several else lambda f, **_: f
    seed = jax.ShapeDtypeStruct((), jnp.uint32)
    with on(mesh):
        shardings = sharding.of(create, seed)
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
