"""Linear layers with sequence parallelism: positions are sharded between layers.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from flax_mha import sharding
from flax_mha.base.shapes import Shape
from flax_mha.sharding import LogicalNames, rules
from flax_mha.sharding.shard_map import run_on_shards


def column_parallel(
    multiply: Callable[..., jax.Array], x: jax.Array, projection: Any, kernel: jax.Array
) -> jax.Array | None:
    """Return multiply(x, kernel), or None if XLA alone sends as little.

    If positions of x are sharded between layers, each device gathers all of them before the
    product, and keeps the gradient of its own: one all-gather forward and one reduce-scatter
    backward. If devices share key/value heads, the gradient of x is a sum over all devices, which
    XLA joins with that of the queries.
    """
    if projection.rows != ("batch", "length") or x.ndim < 2:
        return None
    at = x.ndim - 2
    axes = _sequence_axes(x.shape, at)
    over = _sharing_axes(kernel.shape, projection.names)
    if not axes and not over:
        return None

    def local(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return multiply(jax.lax.all_gather(x, axes, axis=at, tiled=True) if axes else x, kernel)

    names = [("batch", "norm_length" if axes else "length", None), gathered(projection.names)]
    out = ((*x.shape[:-1], *kernel.shape[1:]), projection.names_of_result)
    return sharding.local(local, names, out, x, kernel, over=over)


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


def gather_kernel(
    fn: Callable[..., Any], x: jax.Array, projection: Any, kernel: jax.Array
) -> jax.Array:
    """Return fn(x, kernel), with a kernel sharded by FSDP gathered on Manual axes.

    Its gradient is reduce-scattered. XLA alone would all-reduce it, and then slice.
    """
    rows, shape = projection.rows, x.shape[: x.ndim - projection.contracted]
    at = len(shape) - len(rows)
    axes = rules.unpack_entry(sharding.spec(shape, rows)[at]) if at >= 0 else ()
    names = gathered(projection.names)
    spec = rules.fill_unconstrained(sharding.spec(kernel.shape, projection.names))
    spec = rules.keep_axes(spec, axes)
    # XLA:CPU aborts at sums of half precision over devices that a `jax.shard_map` transposes to.
    aborts = x.dtype.itemsize < 4 and sharding.platform() == "cpu"
    if aborts or not any(spec):
        return fn(x, sharding.constrain(kernel, names))

    def gather(shard: jax.Array) -> jax.Array:
        for i, over in enumerate(spec):
            shard = jax.lax.all_gather(shard, over, axis=i, tiled=True) if over else shard
        return shard

    def local(x: jax.Array, shard: jax.Array) -> Any:
        # XLA would gather axes left Auto, too.
        whole = sharding.local(gather, [names], (kernel.shape, names), shard)
        return fn(x, sharding.constrain(whole, names))

    rows_of_device = PartitionSpec(*[None] * at, rules.pack_entry(axes))
    return run_on_shards(local, set(axes), [rows_of_device, spec], rows_of_device, x, kernel)


def _sharing_axes(shape: Shape, names: LogicalNames) -> tuple[str, ...]:
    """Return the mesh axes of query heads along which devices share a kernel's key/value heads."""
    if "kv_heads" not in names:
        return ()
    own = rules.unpack_entry(sharding.spec(shape, gathered(names))[names.index("kv_heads")])
    # As many heads as devices, so that they divide.
    count = jax.sharding.get_abstract_mesh().size
    (of_queries,) = sharding.spec((count,), ("heads",))
    return tuple(axis for axis in rules.unpack_entry(of_queries) if axis not in own) if own else ()


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
