"""Train experts for a step on several processes, and print the largest error against one device.

python -m tests.models.expert_process ADDRESS COUNT PROCESS, as `tests.support.processes` runs it.
"""

import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from flax_mha import Experts, sharding
from tests.support import processes

MODULE = Experts(24, 8, 2)
RULES = tuple((name, "data" if name == "experts" else axis) for name, axis in sharding.RULES)


def step(params: Any, x: Any) -> Any:
    """Return the output, and the gradients with the balance loss."""

    def loss(params: Any, x: Any) -> Any:
        y, state = MODULE.apply(params, x, mutable=["intermediates"])
        return jnp.sum(jnp.sin(y)) + state["intermediates"]["balance_loss"][0], y

    return jax.grad(loss, (0, 1), has_aux=True)(params, x)


def main(*identity: str) -> None:
    """Print the error of outputs and gradients."""
    processes.join(*identity)
    x = np.random.default_rng(0).normal(size=(8, 4, 16)).astype("f")
    with jax.default_device(jax.local_devices()[0]):
        params = jax.device_get(jax.jit(MODULE.init)(jax.random.key(0), x))
        wanted = jax.device_get(jax.jit(step)(params, x))
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        places = sharding.of(MODULE.init, jax.random.key(0), x)
        placed = jax.device_put((params, x), (places, jax.NamedSharding(mesh, jax.P("data"))))
        processes.tell_error("experts", jax.jit(step)(*placed), wanted)


if __name__ == "__main__":
    main(*sys.argv[1:])
