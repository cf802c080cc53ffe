"""Run layers with shared heads on several processes, and print their errors against one device.

python -m tests.sharding.head_process ADDRESS COUNT PROCESS, as `tests.support.processes` runs it.
Mesh axes that come first are the ones between processes.
"""

import functools
import sys
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from flax_mha import CacheConfig, MultiHeadAttention, QKNorm, masks, sharding
from flax_mha.positions import Rotary
from tests.support import processes

# The kind of mesh of so many processes.
KINDS = {"2": jax.sharding.AxisType.Explicit, "4": jax.sharding.AxisType.Auto}


def changed(**rules: Any) -> tuple[tuple[str, Any], ...]:
    """Return the package's rules with some of them changed."""
    # `tests.support.meshes` makes arrays, which no process may do before it has joined the others.
    return tuple((name, rules.get(name, axis)) for name, axis in sharding.RULES)


GROUPED = changed(heads=("model", "group"), kv_heads=("model", "group"))
LAYER = MultiHeadAttention(
    8, num_kv_heads=4, rotary=Rotary(), qk_norm=QKNorm("rmsnorm"), sinks=True, mask=masks.Causal()
)
X = np.random.default_rng(0).normal(size=(4, 16, 32)).astype("f")
LENGTHS = np.array([6, 3, 0, 5], np.int32)
TRAINED = {
    "heads between processes": {"model": 4, "group": 2, "data": 1},
    "groups between processes": {"group": 2, "model": 4, "data": 1},
}
DECODED = {
    "slots between processes": (
        changed(cache_length="context"), {"context": 4, "model": 2, "data": 1},
    ),
    "slots of a group between processes": (
        changed(heads=("model", "context"), kv_heads="model", cache_length="context"),
        {"context": 2, "model": 4, "data": 1},
    ),
    "slots of all heads between processes": (
        changed(kv_heads=None, cache_length="model"), {"model": 8, "data": 1},
    ),
}  # fmt: skip


def randomized(params: Any) -> Any:
    """Return parameters without zeros and ones, which would hide a wrong head."""
    rng = np.random.default_rng(4)
    return jax.tree.map(lambda x: np.asarray(x + rng.normal(size=x.shape) / 4, x.dtype), params)


@jax.jit
def train(variables: Any, x: Any) -> Any:
    """Return the gradients of parameters and inputs, and the output."""

    def loss(variables: Any, x: Any) -> Any:
        out = LAYER.apply(variables, x)
        return jnp.sum(jnp.sin(3 * out)), out

    return jax.grad(loss, (0, 1), has_aux=True)(variables, x)


def decode(layer: MultiHeadAttention, variables: Any, x: Any) -> Any:
    """Return the outputs of a prompt with rows of different lengths, four steps, and the cache."""

    @functools.partial(jax.jit, static_argnames="is_first")
    def step(variables: Any, x: Any, is_first: bool) -> Any:
        lengths = LENGTHS if is_first else None
        return layer.apply(variables, x, lengths=lengths, mutable=["cache"])

    outs = []
    for first, end in ((0, 6), (6, 7), (7, 8), (8, 13), (13, 14)):
        out, new = step(variables, x[:, first:end], is_first=first == 0)
        variables = variables | new
        outs.append(out)
    return outs, variables["cache"]


def cases() -> Iterator[tuple[str, Any, Any, dict[str, int], Any]]:
    """Yield names, functions of variables and inputs, rules, meshes, and layers to initialize."""
    for name, sizes in TRAINED.items():
        yield name, train, GROUPED, sizes, LAYER
    for i, (name, (rules, sizes)) in enumerate(DECODED.items()):
        for stored in (None, "int8")[: max(1, 2 - i)]:
            layer = LAYER.clone(decode=True, cache=CacheConfig(stored))
            yield f"{name}, {stored}", functools.partial(decode, layer), rules, sizes, layer


def main(*identity: str) -> None:
    """Print the error of each case on a mesh."""
    processes.join(*identity)
    kind = KINDS[identity[1]]
    for name, fn, rules, sizes, layer in cases():
        with jax.default_device(jax.local_devices()[0]):
            variables = jax.device_get(jax.jit(layer.init)(jax.random.key(3), X))
            variables["params"] = randomized(variables["params"])
            wanted = jax.device_get(fn(variables, X))
        types = (kind,) * len(sizes)
        mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
        ends = mesh.devices[0].flat[0], mesh.devices[-1].flat[0]
        assert ends[0].process_index != ends[1].process_index
        with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
            place = sharding.of(layer.init, jax.random.key(3), X)
            whole = jax.NamedSharding(mesh, jax.P())
            placed = jax.device_put((variables, X), (place, whole))
            processes.tell_error(name, fn(*placed), wanted)


if __name__ == "__main__":
    main(*sys.argv[1:])
