"""What a call will run on: asked of the mesh once, and told to all below."""

from collections.abc import Collection

import jax
from jax.sharding import AbstractMesh

from flax_mha import sharding
from flax_mha.kernels.options import Platform


def here(manual: Collection[str] = ()) -> Platform:
    """What is traced here will run on: the devices of the ambient mesh, or those at hand.

    The devices of a mesh need not be at hand: a program can be compiled for chips elsewhere.

    Args:
      manual: mesh axes that each device will run its own shard of, inside `jax.shard_map`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    meant = mesh.abstract_device
    kind = (jax.local_devices()[0] if meant is None else meant).device_kind
    spread = mesh.empty and jax.device_count() > 1
    return Platform(sharding.platform(), kind, None, _undivided(mesh, manual), spread)


def _undivided(mesh: AbstractMesh, manual: Collection[str]) -> str | None:
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
