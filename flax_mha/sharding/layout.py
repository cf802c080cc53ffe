"""Arrays and functions sharded over the ambient mesh."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AbstractMesh, PartitionSpec
from jax.tree_util import Partial

from flax_mha.base import checks
from flax_mha.base.trees import combine, is_array, is_traced, partition
from flax_mha.sharding import rules, shard_map

# True while `init` traces, which uses no activations, so that they need no sharding.
initializing = jax.make_user_context(False)


def constrain(x: jax.Array, names: rules.LogicalNames) -> jax.Array:
    """Shard x by the logical axis rules.

    This is a sharding constraint on Auto axes of the mesh, a reshard on Explicit axes, and nothing
    on Manual axes or without a mesh or rules.

    Args:
      x: an array.
      names: a logical name or None for each of the last axes. Axes without a rule stay as they are.

    Raises:
      ValueError: if the rules do not fit the mesh or the sizes of x.
    """
    mesh = shard_map.ambient_mesh()
    if mesh.empty or not nn.get_logical_axis_rules() or initializing.value:
        return x
    spec = rules.resolve_spec(checks.array("x", x).shape, names, mesh)
    x = reshard(x, spec)
    if mesh.auto_axes and any(part is not rules.UNCONSTRAINED for part in spec):
        x = _constrain_auto(x, rules.keep_axes(spec, mesh.auto_axes))
    return x


def spec(shape: Sequence[int], names: rules.LogicalNames) -> PartitionSpec:
    """Return the `PartitionSpec` of an array by the logical axis rules.

    Axes without a rule are `UNCONSTRAINED`, and so are all on one device.

    Args:
      shape: the array's shape.
      names: the logical names of its last axes.
    """
    mesh = shard_map.ambient_mesh()
    free = (*mesh.auto_axes, *mesh.explicit_axes)
    if math.prod(mesh.shape[axis] for axis in free) == 1:
        return PartitionSpec(*[rules.UNCONSTRAINED] * len(shape))
    if initializing.value:
        return PartitionSpec(*[None] * len(shape))
    return rules.keep_axes(rules.resolve_spec(shape, names, mesh), free)


def manual_axes(specs: Iterable[PartitionSpec]) -> set[str]:
    """Return the mesh axes over which `jax.shard_map` shards arrays with these specs.

    Auto axes without an entry stay Auto if XLA may have sharded an array over them. Axes of size 1
    do not: Mosaic kernels do not run under Auto axes.
    """
    mesh, parts = shard_map.ambient_mesh(), [part for spec in specs for part in spec]
    named = {axis for part in parts for axis in rules.unpack_entry(part)}
    unknown = any(part is rules.UNCONSTRAINED for part in parts)
    axes = {*mesh.explicit_axes, *(a for a in mesh.auto_axes if a in named or not unknown)}
    axes |= shard_map.mapped_axes()[1]
    return axes and axes | {a for a in mesh.auto_axes if mesh.shape[a] == 1}


# Outside jit, JAX would need the array on the devices of the mesh.
_constrain_auto = jax.jit(jax.lax.with_sharding_constraint, static_argnums=1, inline=True)


def reshard(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Reshard x over Explicit axes, as `jax.shard_map` requires."""
    explicit = shard_map.ambient_mesh().explicit_axes
    if not explicit:
        return x
    spec = rules.fill_unconstrained(rules.keep_axes(spec, explicit), spec_of(x))
    return jax.sharding.reshard(shard_map.put_on_mesh(x), spec)


def spec_of(x: jax.Array) -> PartitionSpec:
    """Return how x is sharded over Explicit axes, with an entry for each of its axes."""
    explicit = shard_map.ambient_mesh().explicit_axes
    spec = rules.keep_axes(jax.typeof(x).sharding.spec, explicit)
    return PartitionSpec(*spec, *[None] * (x.ndim - len(spec)))


def local(
    fn: Callable[..., Any], names: Sequence[rules.LogicalNames],
    out: tuple[Sequence[int], rules.LogicalNames], *args: jax.Array, over: Sequence[str] = (),
) -> Any:  # fmt: skip
    """Return fn(*args), computed by each device on its shards.

    Args:
      fn: a module's function, or a `Partial` of one, that runs on Manual axes.
      names: the logical names of the axes of each argument.
      out: the shape of the result, and the logical names of its axes.
      *args: the arrays.
      over: more mesh axes, along which all devices compute the same.
    """
    inputs = [(x.shape, n) for x, n in zip(args, names, strict=True)]
    # An array without batch axes has fewer axes than names.
    arrays = [(shape, n[max(len(n) - len(shape), 0) :]) for shape, n in [*inputs, out]]
    specs = [spec(shape, n) for shape, n in arrays]
    # An axis without a rule is sharded as the first axis with its name, or with its index.
    keys = [(*range(len(shape) - len(n)), *n) for shape, n in arrays]
    known: dict[Any, Any] = {}
    for x, key in reversed([*zip(args, keys, strict=False)]):
        known |= zip(key, spec_of(x), strict=True)
    *ins, of_result = (
        rules.fill_unconstrained(spec, [known.get(name) for name in key])
        for spec, key in zip(specs, keys, strict=True)
    )
    manual = manual_axes(specs) | {*over}
    return shard_map.run_on_shards(fn, manual, ins, of_result, *map(reshard, args, ins))


def like(x: jax.Array, other: jax.Array) -> jax.Array:
    """Reshard x over Explicit axes like another array of the same shape."""
    return reshard(x, spec_of(other))


def auto(fn: Callable[..., Any], names: Any, *args: Any, linear: bool = False) -> Any:
    """Return fn(*args), with the sharding inside left to the compiler on any mesh.

    Explicit axes are Auto inside fn.

    Args:
      fn: a function that closes over no JAX array.
      names: the logical names of the result, in a tree like the result. Axes without a rule follow
        the first array.
      *args: trees of arrays.
      linear: True if fn is a product. The backward pass then keeps the arguments themselves, no
        sharded or cast copies of them.
    """
    mesh = shard_map.ambient_mesh()
    if linear and mesh.size > 1 and is_traced(args):
        return jax.checkpoint(Partial(auto, fn, names), prevent_cse=False)(*args)

    def run(*args: Any) -> Any:
        return jax.tree.map(lambda n, x: constrain(x, n), names, fn(*args), is_leaf=_is_names)

    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return run(*args)
    is_named = any(map(any, jax.tree.leaves(names, is_leaf=_is_names)))
    is_replicated = is_named and (initializing.value or not nn.get_logical_axis_rules())
    arrays, static = partition(args, is_array)
    is_sharded = any(any(spec_of(x)) for x in jax.tree.leaves(arrays))
    if is_replicated and is_sharded and not initializing.value:
        raise ValueError(
            f"arrays sharded over the Explicit mesh axes {mesh.explicit_axes} need logical axis "
            f"rules; wrap in `with nn.logical_axis_rules(rules)`, such as sharding.RULES"
        )

    def spec(n: rules.LogicalNames, x: jax.ShapeDtypeStruct) -> PartitionSpec:
        if is_replicated:
            return PartitionSpec()
        kept = [
            axes if before == after else None
            for first in jax.tree.leaves(arrays)[:1]
            for axes, before, after in zip(spec_of(first), first.shape, x.shape, strict=False)
        ]
        spec = rules.keep_axes(rules.resolve_spec(x.shape, n, mesh), mesh.explicit_axes)
        return rules.fill_unconstrained(spec, kept)

    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
        shapes = jax.eval_shape(lambda x: fn(*combine(x, static)), plain)
    specs = jax.tree.map(spec, names, shapes, is_leaf=_is_names)
    return shard_map.run_auto(lambda x: run(*combine(x, static)), specs, arrays)


def _is_names(x: Any) -> bool:
    return isinstance(x, tuple) and all(n is None or isinstance(n, str) for n in x)
