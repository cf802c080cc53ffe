"""The mesh of a run, and its program on it: one jitted step for any task, seeds and devices."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from experiments.runs.devices import AXES as AXES
from experiments.runs.devices import make_mesh as make_mesh
from experiments.runs.placement import Placement
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
