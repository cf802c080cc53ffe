"""Products with kernels that a mesh shards, with fewer transfers than XLA plans by itself.

FSDP shards each kernel. Sequence parallelism shards positions between layers.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
"""

from collections.abc import Callable
from typing import Any

import jax
import jaxlib.version
from jax.sharding import PartitionSpec
from jax.tree_util import Partial

from flax_mha.sharding import devices, layout, rules
from flax_mha.sharding.rules import LogicalNames, unpack_entry
from flax_mha.sharding.shard_map import run_on_shards

Shape = tuple[int, ...]
Multiply = Callable[[jax.Array, jax.Array], Any]
# Before jaxlib 0.11.2, XLA aborts at the gradients of two `jax.shard_map`s in a row that leave
# axes of several devices Auto.
SHARDED_SUBGROUPS = jaxlib.version.__version_info__ >= (0, 11, 2)


def product(
    multiply: Multiply, names: LogicalNames, rows: LogicalNames, contracted: int, x: jax.Array,
    kernel: jax.Array,
) -> Any:  # fmt: skip
    """Return multiply(x, kernel) [*rows, *features].

    A kernel sharded by FSDP is gathered on Manual axes, so that its gradient is reduce-scattered.
    XLA would all-reduce it and then slice.

    Args:
      multiply: a function of a module, or a `Partial` of one.
      names: the logical names of the kernel's axes.
      rows: the logical names of the other axes of the result.
      contracted: the number of contracted axes, the last ones of x and the first of the kernel.
      x: [*rows, *in].
      kernel: [*in, *features].
    """
    whole, shape = gathered(names), x.shape[: x.ndim - contracted]
    at = len(shape) - len(rows)
    axes = unpack_entry(layout.spec(shape, rows)[at]) if at >= 0 else ()
    spec = rules.fill_unconstrained(layout.spec(kernel.shape, names))
    spec = rules.keep_axes(spec, axes)
    # XLA:CPU aborts at sums of half precision over devices, which this would transpose to.
    aborts = x.dtype.itemsize < 4 and devices.platform() == "cpu"
    if not SHARDED_SUBGROUPS:
        sizes = jax.sharding.get_abstract_mesh().shape
        aborts |= any(size > 1 for axis, size in sizes.items() if axis not in axes)
    compute = Partial(_tensor_parallel, multiply, names, rows, contracted)
    if aborts or not any(spec):
        return compute(x, layout.constrain(kernel, whole))
    on_shard = Partial(_with_shard, compute, whole, spec, kernel.shape)
    of_device = PartitionSpec(*[None] * at, rules.pack_entry(axes))
    return run_on_shards(on_shard, set(axes), [of_device, spec], of_device, x, kernel)


def _with_shard(
    compute: Multiply, names: LogicalNames, spec: PartitionSpec, shape: Shape, x: jax.Array,
    shard: jax.Array,
) -> jax.Array:  # fmt: skip
    """Gather a kernel over the devices of a `jax.shard_map`, and multiply by it."""
    # Not by `all_gather` directly: XLA would also gather axes left Auto.
    kernel = layout.local(Partial(_gather, spec), [names], (shape, names), shard)
    return compute(x, layout.constrain(kernel, names))


def _gather(spec: PartitionSpec, shard: jax.Array) -> jax.Array:
    for i, over in enumerate(spec):
        shard = jax.lax.all_gather(shard, over, axis=i, tiled=True) if over else shard
    return shard


def _tensor_parallel(
    multiply: Multiply, names: LogicalNames, rows: LogicalNames, contracted: int, x: jax.Array,
    kernel: jax.Array,
) -> Any:  # fmt: skip
    """Multiply by a kernel that is whole along the axes of FSDP, but may be sharded over features.

    If positions are sharded between layers, the first product gathers them, and keeps the gradient
    of its own: one all-gather forward, one reduce-scatter backward. The last product, which is
    summed over the same devices, keeps the sums of its own positions: one reduce-scatter forward,
    one all-gather backward. If devices share key/value heads, the gradient of x is a sum over all
    of them, which XLA joins with the sum of the queries.
    """
    at, whole = x.ndim - contracted - 1, gathered(names)
    of_result = (*x.shape[: x.ndim - contracted], *kernel.shape[contracted:])
    gather: tuple[str, ...] = ()
    scatter: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    of_x: LogicalNames = ("batch", "length", *names[:contracted])
    if contracted == 1 and rows == ("batch", "length") and x.ndim >= 2:
        gather, over = _sequence_axes(x.shape, at), _sharing_axes(kernel.shape, names)
        of_x = ("batch", "norm_length" if gather else "length", None)
    elif rows[-1] == "norm_length":
        scatter = _sequence_axes(of_result, at)
        if scatter != unpack_entry(layout.spec(kernel.shape, whole)[0]):
            scatter = ()
    if not (gather or scatter or over):
        return multiply(x, kernel)
    on_device = Partial(_with_collectives, multiply, gather, scatter, at)
    out = (of_result, rows + whole[contracted:])
    return layout.local(on_device, [of_x, whole], out, x, kernel, over=over)


def _with_collectives(
    multiply: Multiply, gather: tuple[str, ...], scatter: tuple[str, ...], at: int, x: jax.Array,
    kernel: jax.Array,
) -> jax.Array:  # fmt: skip
    if gather:
        x = jax.lax.all_gather(x, gather, axis=at, tiled=True)
    result: jax.Array = multiply(x, kernel)
    if scatter:
        result = jax.lax.psum_scatter(result, scatter, scatter_dimension=at, tiled=True)
    return result


def _sharing_axes(shape: Shape, names: LogicalNames) -> tuple[str, ...]:
    """Return the mesh axes along which devices share the key/value heads of a kernel."""
    if "kv_heads" not in names:
        return ()
    own = unpack_entry(layout.spec(shape, gathered(names))[names.index("kv_heads")])
    count = jax.sharding.get_abstract_mesh().size
    (of_queries,) = layout.spec((count,), ("heads",))
    return tuple(axis for axis in unpack_entry(of_queries) if axis not in own) if own else ()


def _sequence_axes(shape: Shape, at: int) -> tuple[str, ...]:
    """Return the mesh axes that shard positions between layers, but not inside them."""
    everywhere, between = (
        unpack_entry(layout.spec(shape[: at + 1], (name,))[at])
        for name in ("length", "norm_length")
    )
    return between[len(everywhere) :] if between[: len(everywhere)] == everywhere else ()


def gathered(names: LogicalNames) -> LogicalNames:
    """Return the logical names of a parameter without the one that FSDP shards."""
    fsdp = "embed" if rules.has_rule("embed") else None
    return tuple(None if name == fsdp else name for name in names)
