"""Linear layers with sequence parallelism: positions are sharded between layers.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from flax_mha import sharding
from flax_mha.base.shapes import Shape
from flax_mha.sharding import LogicalNames, rules
from flax_mha.sharding.shard_map import run_on_shards


def column_parallel(
    multiply: Callable[..., Any], x: jax.Array, projections: Sequence[Any],
    *kernels: jax.Array,
) -> Any:  # fmt: skip
    """Return multiply(x, *kernels) if positions of x, or kernels otherwise, are sharded, else None.

    Each device gathers all positions before the matmuls, and keeps the gradient of its own
    positions: one all-gather forward and one reduce-scatter backward, for all projections together.
    If devices share key/value heads, the gradient of x is one sum over all devices, too.
    """
    if projections[0].rows != ("batch", "length") or x.ndim < 2:
        return None
    at, pairs = x.ndim - 2, list(zip(projections, kernels, strict=True))
    axes = _sequence_axes(x.shape, at)
    if not axes and len({sharding.spec(w.shape, p.names)[1] for p, w in pairs}) == 1:
        return None

    def local(x: jax.Array, *kernels: jax.Array) -> Any:
        return multiply(jax.lax.all_gather(x, axes, axis=at, tiled=True) if axes else x, *kernels)

    x_names = ("batch", "norm_length" if axes else "length", None)
    outs: Any = [((*x.shape[:-1], *w.shape[1:]), p.names_of_result) for p, w in pairs]
    names = [x_names, *(gathered(p.names) for p in projections)]
    return sharding.local(local, names, outs if len(outs) > 1 else outs[0], x, *kernels)


def row_parallel(
    multiply: Callable[..., Any], x: jax.Array, projection: Any, kernel: jax.Array
) -> jax.Array | None:
    """Return multiply(x, kernel) if the devices that sum it also shard its positions, else None.

    Each device keeps the sums of its positions: one reduce-scatter forward, one all-gather
    backward.
    """
    inner, outer = projection.names[: projection.contracted], projection.names_of_result
    shape = (*x.shape[: -projection.contracted], *projection.features)
    names = [("batch", "length", *inner), gathered(projection.names)]
    over, at = sharding.spec(kernel.shape, names[1]), x.ndim - projection.contracted - 1
    if projection.rows[-1] != "norm_length":
        return None
    axes = _sequence_axes(shape, at)
    if not axes or axes != rules.unpack_entry(over[0]):
        return None

    def local(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(multiply(x, kernel), axes, scatter_dimension=at, tiled=True)

    return sharding.local(local, names, (shape, outer), x, kernel)


def gather_all(
    fn: Callable[..., Any], x: jax.Array, projections: Sequence[Any], *kernels: jax.Array
) -> Any:
    """Return fn(x, *kernels), with kernels sharded by FSDP gathered on Manual axes.

    Their gradients are reduce-scattered. XLA alone would all-reduce them, and then slice.
    """
    rows, shape = projections[0].rows, x.shape[: x.ndim - projections[0].contracted]
    at = len(shape) - len(rows)
    axes = rules.unpack_entry(sharding.spec(shape, rows)[at]) if at >= 0 else ()
    names = [gathered(p.names) for p in projections]
    specs = [
        rules.keep_axes(rules.fill_unconstrained(sharding.spec(w.shape, p.names)), axes)
        for w, p in zip(kernels, projections, strict=True)
    ]
    # XLA:CPU aborts at sums of half precision over devices that a `jax.shard_map` transposes to.
    aborts = x.dtype.itemsize < 4 and sharding.platform() == "cpu"
    if aborts or not any(map(any, specs)):
        return fn(x, *map(sharding.constrain, kernels, names))

    def gather(kernel: jax.Array, spec: PartitionSpec) -> jax.Array:
        for i, over in enumerate(spec):
            kernel = jax.lax.all_gather(kernel, over, axis=i, tiled=True) if over else kernel
        return kernel

    def local(x: jax.Array, *shards: jax.Array) -> Any:
        # XLA would gather axes left Auto, too.
        whole = [
            sharding.local(functools.partial(gather, spec=spec), [n], (w.shape, n), shard)
            for spec, n, w, shard in zip(specs, names, kernels, shards, strict=True)
        ]
        return fn(x, *map(sharding.constrain, whole, names))

    rows_of_device = PartitionSpec(*[None] * at, rules.pack_entry(axes))
    return run_on_shards(local, set(axes), [rows_of_device, *specs], rows_of_device, x, *kernels)


def _sequence_axes(shape: Shape, at: int) -> tuple[str, ...]:
    """Return the mesh axes that shard positions between layers but not inside them."""
    everywhere, between = (
        rules.unpack_entry(sharding.spec(shape[: at + 1], (name,))[at])
        for name in ("length", "norm_length")
    )
    return between[len(everywhere) :] if between[: len(everywhere)] == everywhere else ()


def gathered(names: LogicalNames) -> LogicalNames:
    """Return a parameter's logical names without the axis that FSDP shards, as matmuls need it."""
    fsdp = "embed" if rules.has_rule("embed") else None
    return tuple(None if name == fsdp else name for name in names)
