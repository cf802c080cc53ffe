"""Meshes of 8 devices, and comparisons with one device."""

from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

from experiments.plan.collectives import Collective, read
from flax_mha import sharding
from tests.support.oracle import error

KINDS = {"Auto": AxisType.Auto, "Explicit": AxisType.Explicit}
# A type for each axis.
MIXED = {
    "data Auto, model Explicit": (AxisType.Auto, AxisType.Explicit),
    "data Explicit, model Auto": (AxisType.Explicit, AxisType.Auto),
}
B, T, N, H = 4, 70, 8, 4
RNG = np.random.default_rng(0)
KEY = jax.random.key(3)
X = jnp.asarray(RNG.normal(size=(B, 16, 32)), jnp.float32)
FORWARD, BACKWARD = 2e-6, 1e-5


def on(kind: str, rules: Any = sharding.RULES, shape: tuple[int, ...] = (2, 4)) -> Any:
    """Return a mesh of 8 devices with its rules, and a function that leaves both."""
    types = MIXED[kind] if kind in MIXED else (KINDS[kind],) * len(shape)
    mesh = jax.make_mesh(shape, ("data", "model", "group")[: len(shape)], axis_types=types)
    stack = jax.set_mesh(mesh)
    stack.__enter__()
    inner = nn.logical_axis_rules(rules)
    inner.__enter__()

    def leave() -> None:
        inner.__exit__(None, None, None)
        stack.__exit__(None, None, None)

    return mesh, leave


def described(model: nn.Module, *inputs: Any) -> Any:
    """Return a model's variables as shapes with shardings on this mesh, for compilation only."""
    return jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
        jax.eval_shape(model.init, KEY, *inputs), sharding.of(model.init, KEY, *inputs),
    )  # fmt: skip


def changed(**rules: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((name, rules.get(name, axis)) for name, axis in sharding.RULES)


# Heads over two mesh axes: key/value heads take the first, or both.
GROUPED = tuple((n, ("model", "group") if a == "model" else a) for n, a in sharding.RULES)
# Heads over two devices and positions over four; or only positions, over "model".
FOUR = changed(batch=None, heads="data", kv_heads="data", length="model", mlp=None, vocab=None)
EIGHT = changed(batch="data", heads=None, kv_heads=None, length="model", mlp=None, vocab=None)
# Positions over both axes: a ring over "data", and heads over "model" inside attention.
BOTH = changed(
    batch=None, heads=None, kv_heads=None, length=("data", "model"), mlp=None, vocab=None
)


def compare(
    fn: Callable[..., Any], args: Any, kind: str, rules: Any, specs: Any,
    shape: tuple[int, ...] = (2, 4),
) -> None:  # fmt: skip
    """Check fn's results and gradients on a mesh against the ones without."""

    def loss(*args: Any) -> Any:
        out = fn(*args)
        return sum(jnp.sum(jnp.sin(3 * x)) for x in jax.tree.leaves(out)), out

    floating = tuple(i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating))
    whole = jax.jit(jax.grad(loss, floating, has_aux=True))
    gradients, out = whole(*args)
    mesh, leave = on(kind, rules, shape)
    try:
        placed = [
            jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, specs, strict=True)
        ]
        got, got_out = jax.device_get(jax.jit(jax.grad(loss, floating, has_aux=True))(*placed))
    finally:
        leave()
    for a, b in zip(jax.tree.leaves(got_out), jax.tree.leaves(out), strict=True):
        assert error(a, b) < FORWARD
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(gradients), strict=True):
        assert error(a, b) < BACKWARD


def collectives(text: str) -> list[tuple[str, int]]:
    """Return the collectives of a compiled program, and the bytes of each on one device."""
    return [(one.kind, one.bytes) for one in read(text, devices=8)]


def total(found: Iterable[Collective]) -> dict[str, tuple[int, int]]:
    """Return the number of runs of each kind, and the bytes of their results on one device."""
    sums: dict[str, tuple[int, int]] = {}
    for one in found:
        count, size = sums.get(one.kind, (0, 0))
        sums[one.kind] = count + one.times, size + one.times * one.bytes
    return sums
