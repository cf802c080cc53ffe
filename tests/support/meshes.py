"""Meshes of 8 devices, and comparisons with one device."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.plan.collectives import Collective, read
from flax_mha import sharding
from tests.support.oracle import error, random_like

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


@contextlib.contextmanager
def on(
    kind: str, rules: Any = sharding.RULES, shape: tuple[int, ...] = (2, 4)
) -> Iterator[jax.sharding.Mesh]:
    """Run on a mesh of 8 devices with these rules."""
    types = MIXED[kind] if kind in MIXED else (KINDS[kind],) * len(shape)
    mesh = jax.make_mesh(shape, ("data", "model", "group")[: len(shape)], axis_types=types)
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        yield mesh


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
    shape: tuple[int, ...] = (2, 4), *, alone: Callable[..., Any] | None = None,
    bounds: tuple[float, float] = (FORWARD, BACKWARD), atol: float = 0.0,
) -> None:  # fmt: skip
    """Check fn's results and gradients on a mesh against those without one.

    Args:
      fn: the function.
      args: its arguments, arrays or trees of them.
      kind: the kind of the mesh's axes.
      rules: the logical axis rules.
      specs: the spec of each argument, or a function that returns shardings on the mesh.
      shape: the shape of the mesh.
      alone: the function without a mesh, if it differs.
      bounds: the largest errors of results and of gradients.
      atol: smaller differences are ignored, for gradients that cancel to nearly 0.
    """
    floating = tuple(
        i for i, x in enumerate(args) if jnp.issubdtype(jax.tree.leaves(x)[0].dtype, jnp.floating)
    )

    def gradients(fn: Callable[..., Any]) -> Any:
        def loss(*args: Any) -> Any:
            out = fn(*args)
            return sum(jnp.sum(jnp.sin(3 * x)) for x in jax.tree.leaves(out)), out

        return jax.jit(jax.grad(loss, floating, has_aux=True))

    wanted, out = jax.device_get(gradients(alone or fn)(*args))
    with on(kind, rules, shape) as mesh:
        places = specs() if callable(specs) else [NamedSharding(mesh, spec) for spec in specs]
        placed = [jax.device_put(x, at) for x, at in zip(args, places, strict=True)]
        got, got_out = jax.device_get(gradients(fn)(*placed))
    for found, expected, bound in zip((got_out, got), (out, wanted), bounds, strict=True):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert error(a, b) < bound or np.abs(a - b).max() < atol


def compare_model(
    model: nn.Module, x: Any, kind: str, rules: Any, shape: tuple[int, ...] = (2, 4), **more: Any
) -> None:
    """Check a model's output and gradients on a mesh, in training, against those without one."""
    init = functools.partial(model.init, deterministic=True)
    params = random_like(jax.eval_shape(init, KEY, x))

    def apply(params: Any, x: Any) -> Any:
        return model.apply(params, x, deterministic=False, rngs={"dropout": KEY})

    def places() -> Any:
        rows = NamedSharding(jax.sharding.get_mesh(), P(dict(rules)["batch"]))
        return sharding.of(init, KEY, x), rows

    compare(apply, (params, x), kind, rules, places, shape, **more)


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
