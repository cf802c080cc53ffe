"""Arrays laid out over the ambient mesh: constraints, shards, and functions of them."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec

from flax_mha.base import checks
from flax_mha.base.trees import combine, is_array, partition
from flax_mha.sharding import rules
from flax_mha.sharding.shard_map import over

# True while `init` traces: activations are then laid out nowhere, for nobody will read them.
initializing = jax.make_user_context(False)


def constrain(x: jax.Array, names: rules.LogicalNames) -> jax.Array:
    """Lays x out as the rules say, on whatever mesh there is.

    With no mesh or no rules, and on Manual axes (inside `jax.shard_map`), nothing happens. On
    Auto axes it is a constraint for the compiler, on Explicit axes a reshard. An axis whose name
    has no rule stays as it is.

    Args:
      x: an array.
      names: a logical name or None for each of the last axes of x; further leading axes are
        left alone.

    Raises:
      ValueError: if the rules do not fit the mesh or the sizes of x.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not nn.get_logical_axis_rules() or initializing.value:
        return x
    if mesh.empty:
        warn_of_unseen_mesh()
        return x
    spec = rules.checked(checks.array("x", x).shape, names, mesh)
    x = reshard(x, spec)
    if mesh.auto_axes and any(part is not rules.UNCONSTRAINED for part in spec):
        x = guide(x, rules.only(spec, mesh.auto_axes))
    return x


def spec(shape: Sequence[int], names: rules.LogicalNames) -> PartitionSpec:
    """The mesh axes that the rules give each axis of an array.

    `UNCONSTRAINED` where they say nothing, and if there is nothing to divide: no mesh, one device,
    inside `jax.shard_map`.

    Args:
      shape: of the array.
      names: the logical names of its last axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = (*mesh.auto_axes, *mesh.explicit_axes)
    if math.prod(dict(mesh.shape)[axis] for axis in free) == 1:
        return PartitionSpec(*[rules.UNCONSTRAINED] * len(shape))
    if initializing.value:
        return PartitionSpec(*[None] * len(shape))
    return rules.only(rules.checked(shape, names, mesh), free)


def manual(specs: Iterable[PartitionSpec], mesh: AbstractMesh) -> set[str]:
    """Return the mesh axes over which `jax.shard_map` divides arrays laid out by these specs.

    Over Auto axes that no spec names the compiler may have divided unconstrained axes. To keep
    that, these axes are left to the compiler inside, too, but for those of one device: there is
    nothing to divide, and Mosaic's kernels run only where no axis is left.
    """
    parts = [part for spec in specs for part in spec]
    named = {axis for part in parts for axis in rules.each(part)}
    unknown = any(part is rules.UNCONSTRAINED for part in parts)
    axes = {*mesh.explicit_axes, *(a for a in mesh.auto_axes if a in named or not unknown)}
    return axes and axes | {a for a in mesh.auto_axes if mesh.shape[a] == 1}


@functools.partial(jax.jit, static_argnames="spec", inline=True)
def guide(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Tells the compiler how x lies over Auto axes.

    By `jax.jit`, for outside of it JAX constrains only what is on the devices of the mesh already.
    """
    return jax.lax.with_sharding_constraint(x, spec)


def reshard(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Lays x out where JAX asks for it before `jax.shard_map`: on Explicit axes."""
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    if not explicit:
        return x
    return jax.sharding.reshard(x, rules.filled(rules.only(spec, explicit), spec_of(x)))


def spec_of(x: jax.Array) -> PartitionSpec:
    """How x is divided over Explicit axes, an entry for each of its axes."""
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    spec = rules.only(jax.typeof(x).sharding.spec, explicit)
    return PartitionSpec(*spec, *[None] * (x.ndim - len(spec)))


def local(
    fn: Callable[..., Any], names: Sequence[rules.LogicalNames], outs: Any, *args: jax.Array
) -> Any:
    """fn(*args), each device on its own shards.

    Args:
      fn: a function of arrays, on Manual axes.
      names: the logical names of each of them.
      outs: a pair (shape, names) for its result, or a list of those.
      *args: the arrays.
    """
    mesh = jax.sharding.get_abstract_mesh()
    several = isinstance(outs, list)
    inputs = [(x.shape, n) for x, n in zip(args, names, strict=True)]
    # Without a batch an array has fewer axes than names.
    every = [
        (shape, n[max(len(n) - len(shape), 0) :])
        for shape, n in [*inputs, *(outs if several else [outs])]
    ]
    specs = [spec(shape, n) for shape, n in every]
    # An axis without a rule lies as the first of its name does, or, before the named, of its place.
    keys = [(*range(len(shape) - len(n)), *n) for shape, n in every]
    known: dict[Any, Any] = {}
    for x, key in reversed([*zip(args, keys, strict=False)]):
        known |= zip(key, spec_of(x), strict=True)
    full = [
        rules.filled(spec, [known.get(name) for name in key])
        for spec, key in zip(specs, keys, strict=True)
    ]
    ins, out_specs = full[: len(args)], full[len(args) :]
    outs = out_specs if several else out_specs[0]
    return over(fn, manual(specs, mesh), ins, outs, *map(reshard, args, ins))


def like(x: jax.Array, other: jax.Array) -> jax.Array:
    """Lays x out as other, of the same shape, where JAX asks for it: on Explicit axes."""
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return x
    return jax.sharding.reshard(x, spec_of(other))


def auto(fn: Callable[..., Any], names: Any, *args: Any) -> Any:
    """fn(*args), laid out by names; what happens inside is left to the compiler on any mesh.

    On Explicit axes JAX asks of many operations (reshapes, gathers, products over a divided axis)
    where their results belong. Inside fn these axes are Auto, and `constrain` guides the compiler.

    Args:
      fn: a function that closes over no array of JAX.
      names: the logical names of its result, in the form of its result. An axis without a rule
        lies as that axis of the first array does.
      *args: trees of arrays.
    """
    mesh = jax.sharding.get_abstract_mesh()

    def run(*args: Any) -> Any:
        return jax.tree.map(lambda n, x: constrain(x, n), names, fn(*args), is_leaf=_is_names)

    if not mesh.explicit_axes:
        return run(*args)
    whole = initializing.value or not nn.get_logical_axis_rules()
    # What are no arrays of JAX pass by themselves.
    arrays, static = partition(args, is_array)
    if whole and any(any(spec_of(x)) for x in jax.tree.leaves(arrays)):
        raise ValueError(
            f"arrays divided over the Explicit mesh axes {mesh.explicit_axes} need rules that say "
            f"what is; wrap in `with nn.logical_axis_rules(sharding.RULES)`"
        )

    def spec(n: rules.LogicalNames, x: jax.ShapeDtypeStruct) -> PartitionSpec:
        if whole:
            return PartitionSpec()
        first = jax.tree.leaves(arrays)[0]
        alike = zip(spec_of(first), first.shape, x.shape, strict=False)
        kept = [axes if before == after else None for axes, before, after in alike]
        spec = rules.only(rules.checked(x.shape, n, mesh), mesh.explicit_axes)
        return rules.filled(spec, kept)

    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
        shapes = jax.eval_shape(lambda x: fn(*combine(x, static)), plain)
    specs = jax.tree.map(spec, names, shapes, is_leaf=_is_names)
    inside = jax.sharding.auto_axes(
        lambda x: run(*combine(x, static)), axes=mesh.explicit_axes, out_sharding=specs
    )
    if mesh.manual_axes:
        # Inside `jax.shard_map` over other axes, JAX refuses residuals of what is Auto in it; and
        # does not run it outside jit.
        inside = jax.checkpoint(jax.jit(inside))
    return inside(arrays)


def _is_names(x: Any) -> bool:
    return isinstance(x, tuple) and all(n is None or isinstance(n, str) for n in x)


def platform() -> str:
    """The platform that what is traced here will run on.

    That of the ambient mesh's devices, which need not be those at hand: a program can be compiled
    for chips that are elsewhere. Without a mesh it is JAX's default.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def warn_of_unseen_mesh() -> None:
    """Warns of `with mesh:`, which sets no mesh that rules could be used on."""
    try:
        # JAX has no public name for such a mesh, but takes a PartitionSpec only under some mesh.
        jax.lax.with_sharding_constraint(np.float32(0), PartitionSpec())
    except (RuntimeError, ValueError):
        return
    checks.warn(
        "logical axis rules divide nothing under `with mesh:`, which JAX has deprecated; "
        "write `with jax.set_mesh(mesh):`"
    )
