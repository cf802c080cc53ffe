"""The arrays of a run over processes, seeds and devices."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import grain
import grain.experimental
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict


@dataclasses.dataclass(frozen=True)
class Placement:
    """The state and the batches of a run on its mesh.

    Attributes:
      config: the run's config.
      task: its task.
      mesh: its mesh.
      rules: the mesh axes of each logical axis.
      shardings: the shardings of its state.
      create: a jitted function from `seeds` to a state.
    """

    config: ConfigDict
    task: Any
    mesh: Mesh
    rules: Any
    shardings: Any
    create: Callable[[jax.Array], Any]

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
        size, over = self.config.batch_size, self._over_batch(len(seeds))
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*seeds, size, *x.shape[1:]), x.dtype, sharding=over),
            row,
        )

    def batches(self) -> grain.DatasetIterator:
        """Return this process's rows of the training batches, [seeds, rows, ...] if several."""
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
        spec = nn.logical_to_mesh_axes((*[None] * axis, "batch"), self.rules)
        return NamedSharding(self.mesh, spec or PartitionSpec())
