"""The platform that a call will run on."""

from collections.abc import Collection

import jax
from jax.sharding import AbstractMesh

from flax_mha import sharding
from flax_mha.kernels.call.spec import Platform
from flax_mha.sharding.shard_map import mapped_axes


def current_platform(manual: Collection[str] = ()) -> Platform:
    """Return the platform that the traced call will run on: the mesh's devices, or the local ones.

    The devices of a mesh may be elsewhere, because a program can be compiled for other chips.
    `jax.shard_map` shards the call over the mesh axes in `manual`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    device = jax.local_devices()[0] if device is None else device
    reason = _not_partitionable(mesh, manual)
    automatic = mesh.empty and jax.device_count() > 1
    return Platform(sharding.platform(), device.device_kind, None, reason, automatic)


def _not_partitionable(mesh: AbstractMesh, manual: Collection[str]) -> str | None:
    if mesh.empty:
        if jax.device_count() == 1:
            return None
        return (
            f"XLA can't divide it between the {jax.device_count()} devices by itself; wrap in "
            f"`with jax.set_mesh(mesh)`, of one device or with rules (see flax_mha.sharding)"
        )
    sizes = dict(mesh.shape)
    axes = (*mesh.auto_axes, *mesh.explicit_axes)
    free = [axis for axis in axes if sizes[axis] > 1 and axis not in manual]
    if not free:
        return None
    if mapped := mapped_axes()[0].intersection(free):
        return f"jax.vmap maps over the Explicit mesh axes {[*mapped]}; add a batch axis instead"
    return (
        f"no rule uses the mesh axes {free}; wrap in `with nn.logical_axis_rules(sharding.RULES)`, "
        f"or add a rule each for 'batch', 'length' and 'heads'"
    )
