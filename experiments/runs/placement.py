"""Batches over processes, seeds and devices."""

from typing import Any

import flax.linen as nn
import grain
import grain.experimental
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

# Each takes the run's `experiments.trainer.mesh.Program`, under its mesh or not.


def batches(program: Any) -> grain.DatasetIterator:
    """Return this process's rows of the training batches, [seeds, rows, ...] of several seeds."""
    config, size = program.config, program.config.batch_size
    spans = over_batch(program, 0).addressable_devices_indices_map((size,)).values()
    # On a pod they need not be neighbours: the mesh follows the wires between the devices.
    rows = np.unique([np.arange(size)[index] for index in spans])
    seeds = range(config.seed, config.seed + config.seeds)
    streams = [program.task.batches(seed, size, rows) for seed in seeds]
    if len(streams) == 1:
        return iter(streams[0])
    together = grain.experimental.ZipIterDataset(streams)
    return iter(together.map(lambda each: jax.tree.map(lambda *x: np.stack(x), *each)))


def put(program: Any, local: Any) -> Any:
    """Return a training batch as global arrays, from the rows of each process."""
    axis = int(program.config.seeds > 1)
    over = over_batch(program, axis)

    def place(x: np.ndarray) -> jax.Array:
        shape = (*x.shape[:axis], program.config.batch_size, *x.shape[axis + 1 :])
        return jax.make_array_from_process_local_data(over, x, shape)

    return jax.tree.map(place, local)


def put_test(program: Any, batch: Any) -> Any:
    """Return a test batch as global arrays, padded (with weight 0) to split evenly."""
    parts, over = program.mesh.shape["data"] * program.mesh.shape["fsdp"], over_batch(program, 0)

    def place(x: np.ndarray) -> jax.Array:
        x = np.pad(x, [(0, -len(x) % parts), *[(0, 0)] * (x.ndim - 1)])
        return jax.make_array_from_callback(x.shape, over, lambda i: x[i])

    return jax.tree.map(place, batch)


def abstract_batch(program: Any) -> Any:
    """Return shapes, dtypes and shardings of a training batch."""
    config = program.config
    row = next(iter(program.task.batches(config.seed, 1, np.arange(1))))
    seeds = (config.seeds,) if config.seeds > 1 else ()
    over = over_batch(program, len(seeds))
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            (*seeds, config.batch_size, *x.shape[1:]), x.dtype, sharding=over
        ),
        row,
    )


def over_batch(program: Any, axis: int) -> NamedSharding:
    """Return the sharding of an array whose rows lie along an axis."""
    with program.on_mesh():
        spec = nn.logical_to_mesh_axes((*[None] * axis, "batch"))
    return NamedSharding(program.mesh, spec or PartitionSpec())
