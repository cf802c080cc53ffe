"""The mesh of a run, and its program on it: one jitted step for any task, seeds and devices."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import grain
import grain.experimental
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from experiments.common.devices import make_mesh
from experiments.common.failures import RunError
from experiments.tasks.task import Batch, Metrics, Params, Task
from flax_mha import sharding


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
        """Place the parameters of one model like the state's, once for each seed."""
        axes, expected = int(self.config.seeds > 1), self.abstract_state().params
        shapes = jax.tree.map(lambda x: x.shape[axes:], expected)
        if jax.tree.map(np.shape, params) != shapes:
            raise RunError("--weights must be of a run with the same config.model; give its values")

        def place(x: Any, target: jax.ShapeDtypeStruct) -> jax.Array:
            x = np.broadcast_to(np.asarray(x, target.dtype), target.shape)
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
