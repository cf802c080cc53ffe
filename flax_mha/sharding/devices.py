"""The devices that a traced program is for."""

from collections.abc import Collection
from typing import NamedTuple

import jax


class Platform(NamedTuple):
    """The devices that a call will run on.

    Attributes:
      name: JAX's name of the platform: "cpu", "gpu" or "tpu".
      device: JAX's name of the device kind, such as "NVIDIA H200".
      cudnn: the version of cuDNN, such as (9, 20, 0); None for the installed one.
      not_partitionable: why kernels that XLA cannot shard refuse the call, or None.
      auto_partitioned: True if XLA shards the call between several devices without a mesh.
    """

    name: str
    device: str = ""
    cudnn: tuple[int, int, int] | None = None
    not_partitionable: str | None = None
    auto_partitioned: bool = False


# The context to trace functions for a `Platform`, or None.
target = jax.make_user_context(None)


def platform() -> str:
    """Return JAX's name of the platform that the traced program is for.

    This is the platform of `flax_mha.kernels.use`, else of the ambient mesh, else JAX's default.
    """
    if (known := target.value) is not None:
        return known.name
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def current_platform(manual: Collection[str] = ()) -> Platform:
    """Return the devices that the traced call is for, sharded over the mesh axes in `manual`."""
    mesh, known = jax.sharding.get_abstract_mesh(), target.value
    if known is None:
        device = jax.local_devices()[0] if mesh.abstract_device is None else mesh.abstract_device
        known = Platform(platform(), device.device_kind)
        if mesh.empty and (count := jax.device_count()) > 1:
            return known._replace(auto_partitioned=True, not_partitionable=(
                f"XLA can't divide it between the {count} devices by itself; wrap in `with "
                f"jax.set_mesh(mesh)`, of one device or with rules (see flax_mha.sharding)"
            ))  # fmt: skip
    axes = (*mesh.auto_axes, *mesh.explicit_axes)
    free = [axis for axis in axes if mesh.shape[axis] > 1 and axis not in manual]
    why = (
        f"no rule uses the mesh axes {free}, or jax.vmap maps over them; wrap in `with "
        f"nn.logical_axis_rules(sharding.RULES)`, add a rule each for 'batch', 'length' and "
        f"'heads', or a batch axis"
    )
    return known if mesh.empty else known._replace(not_partitionable=why if free else None)
