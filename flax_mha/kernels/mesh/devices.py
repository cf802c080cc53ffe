"""The platform that a call will run on: asked of the mesh once, and told to all below."""

from collections.abc import Collection

import jax
from jax.sharding import AbstractMesh

from flax_mha import sharding
from flax_mha.kernels.spec import Platform


def current_platform(manual: Collection[str] = ()) -> Platform:
    """Return the platform of what is traced here: the ambient mesh's devices, or those at hand.

    The devices of a mesh need not be at hand: a program can be compiled for chips elsewhere.

    Args:
      manual: mesh axes that each device will run its own shard of, inside `jax.shard_map`.
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
    return (
        f"no rule says what the mesh axes {free} divide; wrap in `with "
        f"nn.logical_axis_rules(sharding.RULES)`, or add a rule each for 'batch', 'length' and "
        f"'heads'"
    )
