"""Products with kernels that a mesh shards, with fewer transfers than XLA plans by itself.

FSDP shards each kernel. Sequence parallelism shards positions between layers.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jaxlib.version
from jax.sharding import PartitionSpec
from jax.tree_util import Partial

from flax_mha.base import symbols
from flax_mha.base.tensors import HEADS
from flax_mha.sharding import devices, layout, rules
from flax_mha.sharding.rules import LogicalNames, unpack_entry
from flax_mha.sharding.shard_map import run_on_shards

Shape = tuple[int, ...]
Multiply = Callable[[jax.Array, jax.Array], Any]
# Before jaxlib 0.11.2, XLA aborts at the gradients of two `jax.shard_map`s in a row that leave
# axes of several devices Auto.
SHARDED_SUBGROUPS = jaxlib.version.__version_info__ >= (0, 11, 2)


def product(
    parallel: Callable[..., Any], multiply: Multiply, names: LogicalNames, rows: LogicalNames,
    contracted: int, x: jax.Array, kernel: jax.Array,
) -> Any:  # fmt: skip
    """Return multiply(x, kernel) [*rows, *features].

    A kernel sharded by FSDP is gathered on Manual axes, so that its gradient is reduce-scattered,
    not all-reduced.

    Args:
      parallel: `column_parallel` or `row_parallel`.
      multiply: a function of a module, or a `Partial` of one.
      names: the logical names of the kernel's axes.
      rows: the logical names of the other axes of the result.
      contracted: the number of contracted axes.
      x: [*rows, *in].
      kernel: [*in, *features].
    """
    whole, shape = gathered(names), x.shape[: x.ndim - contracted]
    at = len(shape) - len(rows)
    axes = unpack_entry(layout.spec(shape, rows)[at]) if at >= 0 else ()
    spec = rules.fill_unconstrained(layout.spec(kernel.shape, names))
    spec = rules.keep_axes(spec, axes)
    aborts = _aborts(x)
    if not SHARDED_SUBGROUPS:
        sizes = jax.sharding.get_abstract_mesh().shape
        aborts |= any(size > 1 for axis, size in sizes.items() if axis not in axes)
    compute = Partial(parallel, multiply, names, rows, contracted)
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

    @jax.checkpoint  # The backward pass gathers it again, so that no whole kernel stays in memory.
    def multiply(x: jax.Array, shard: jax.Array) -> jax.Array:
        # Not by `all_gather` directly: XLA would also gather axes left Auto.
        kernel = layout.local(Partial(gather, spec), [names], (shape, names), shard)
        return compute(x, layout.constrain(kernel, names))

    return multiply(x, shard)


def gather(spec: PartitionSpec, shard: jax.Array) -> jax.Array:
    """Gather an array along the mesh axes of a spec, inside a `jax.shard_map`."""
    for i, over in enumerate(spec):
        shard = jax.lax.all_gather(shard, over, axis=i, tiled=True) if over else shard
    return shard


def joined(*inputs: jax.Array | None) -> tuple[Any, ...]:
    """Return the inputs of several products, so that XLA sums their gradients over devices at once.

    XLA merges two such sums only if no other gradient is added in between, such as that of a
    residual around the layer.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return inputs
    apart = {id(x): jax.lax.optimization_barrier(x) for x in inputs}
    return tuple(apart[id(x)] for x in inputs)


def unmerged(
    x_k: jax.Array, x_v: jax.Array, q: jax.Array, heads: int
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Return the inputs of keys and values, so that XLA for GPUs does not merge their products.

    XLA merges products of one input that take at most 32 MiB each, and copies slices of the result.
    From 8 MiB on, separate products move less, if heads are not sharded and have at least half as
    many features as the input.

    Args:
      x_k: [*B, S, D].
      x_v: [*B, S, D].
      q: the queries [*B, T, N, H].
      heads: the number of key/value heads.
    """
    mesh, features = jax.sharding.get_abstract_mesh(), heads * q.shape[-1]
    size = x_k.size // x_k.shape[-1] * features // (mesh.size or 1)
    is_merged = symbols.at_most(size, 2**24) and not symbols.at_most(size, 2**22 - 1)
    axes = unpack_entry(layout.spec(q.shape, HEADS)[-2])
    if (
        is_merged and 2 * features >= x_k.shape[-1] and q.dtype.itemsize == 2
        and devices.platform() == "gpu" and all(mesh.shape[axis] == 1 for axis in axes)
    ):  # fmt: skip
        x_k = _after(x_k, q)
        x_v = _after(x_v, x_k)
    return x_k, x_v


@jax.custom_jvp
def _after(x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier((x, y))[0]


@_after.defjvp
def _after_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    # Gradients of x are summed as without the barrier.
    return _after(*primals), tangents[0]


def fsdp_axes(kernel: jax.Array, names: LogicalNames) -> PartitionSpec:
    """Return the mesh axes over which FSDP shards each axis of a kernel, none if XLA gathers it."""
    if _aborts(kernel):
        return PartitionSpec()
    spec, fsdp = layout.spec(kernel.shape, names), gathered(names)
    return PartitionSpec(*(
        rules.pack_entry(unpack_entry(axes)) if name != kept else None
        for axes, name, kept in zip(spec, names, fsdp, strict=True)
    ))  # fmt: skip


def _aborts(x: jax.Array) -> bool:
    """Tell if XLA aborts at sums over devices of arrays like x, the gradients of gathers."""
    return x.dtype.itemsize < 4 and devices.platform() == "cpu"


def column_parallel(
    multiply: Multiply, names: LogicalNames, rows: LogicalNames, contracted: int, x: jax.Array,
    kernel: jax.Array,
) -> Any:  # fmt: skip
    """Multiply by a kernel whose features are sharded, and whole along the axes of FSDP.

    If positions of x are sharded between layers: one all-gather forward, one reduce-scatter
    backward. If devices share key/value heads, XLA joins the sum of their gradients of x with the
    queries'.
    """
    at = x.ndim - 2
    if contracted > 1 or rows != ("batch", "length") or at < 0:
        return multiply(x, kernel)
    axes, over = _sequence_axes(x.shape, at), _sharing_axes(kernel.shape, names)
    if not axes and not over:
        return multiply(x, kernel)
    of_x = ("batch", "norm_length" if axes else "length", None)
    on_device = Partial(_gather_positions, multiply, axes, at)
    out = (*x.shape[:-1], *kernel.shape[1:]), rows + gathered(names[1:])
    return layout.local(on_device, [of_x, gathered(names)], out, x, kernel, over=over)


def _gather_positions(
    multiply: Multiply, axes: tuple[str, ...], at: int, x: jax.Array, kernel: jax.Array
) -> jax.Array:
    if not axes:
        return multiply(x, kernel)

    # Under a scan, the backward pass gathers x again, once for all products of x.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def multiply_whole(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return multiply(jax.lax.all_gather(x, axes, axis=at, tiled=True), kernel)

    return multiply_whole(x, kernel)


def row_parallel(
    multiply: Multiply, names: LogicalNames, rows: LogicalNames, contracted: int, x: jax.Array,
    kernel: jax.Array,
) -> Any:  # fmt: skip
    """Multiply by a kernel whose contracted axes are sharded, and whole along the axes of FSDP.

    If the devices that sum a product also shard its positions: one reduce-scatter forward, one
    all-gather backward.
    """
    at, whole = x.ndim - contracted - 1, gathered(names)
    shape = (*x.shape[: at + 1], *kernel.shape[contracted:])
    axes = _sequence_axes(shape, at)
    if not axes or axes != unpack_entry(layout.spec(kernel.shape, whole)[0]):
        return multiply(x, kernel)
    of_x = ("batch", "length", *names[:contracted])
    on_device = Partial(_scatter_positions, multiply, axes, at)
    return layout.local(on_device, [of_x, whole], (shape, rows + whole[contracted:]), x, kernel)


def _scatter_positions(
    multiply: Multiply, axes: tuple[str, ...], at: int, x: jax.Array, kernel: jax.Array
) -> jax.Array:
    return jax.lax.psum_scatter(multiply(x, kernel), axes, scatter_dimension=at, tiled=True)


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
