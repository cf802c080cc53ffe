"""Which mesh axes divide an array, by the rules, and whether they can; arrays laid out so."""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec

from flax_mha import inputs

LogicalNames: TypeAlias = tuple[str | None, ...]

# What a PartitionSpec says of an axis that is to stay as it is.
UNCONSTRAINED = PartitionSpec.UNCONSTRAINED

# One row or one token can't be divided, and need not be.
_TOKENS = ("batch", "length", "norm_length")

P = ParamSpec("P")
R = TypeVar("R")


def checked(shape: Sequence[int], names: LogicalNames, mesh: AbstractMesh) -> PartitionSpec:
    """The mesh axes of each axis of an array, if it can be laid out so; names of its last axes.

    `UNCONSTRAINED` where nothing is said: a name without a rule, or an axis before the named ones.
    """
    if not isinstance(names, tuple | list) or not all(isinstance(n, str | None) for n in names):
        raise TypeError(
            f"names must be a tuple of logical names, a str or None for each axis, got {names!r}; "
            f"give ('batch', None), say"
        )
    last: Any = tuple(names[max(len(names) - len(shape), 0) :])
    names = (UNCONSTRAINED,) * (len(shape) - len(last)) + last
    rules = _rules()
    sizes, free = dict(mesh.shape), (*mesh.auto_axes, *mesh.explicit_axes)
    parts: list[Any] = []
    found = nn.logical_to_mesh_axes(names, rules) or PartitionSpec()
    for size, name, axes in zip(shape, names, found, strict=True):
        wanted = [given for rule, given in rules if rule == name]
        if name is not None and not wanted:
            parts.append(UNCONSTRAINED)
            continue
        unknown = sorted({axis for given in wanted for axis in each(given)} - set(sizes))
        if unknown:
            raise ValueError(
                f"the rule {(name, wanted[0])} names the mesh axis {unknown}, and the mesh has "
                f"{sizes}; make it with that axis (a size of 1 will do), or change the rule"
            )
        if axes is None and wanted and None not in wanted:
            raise ValueError(
                f"{name!r} is to be divided over {wanted[0]!r}, which another axis of the same "
                f"array {names} takes already; give it another mesh axis, or the rule "
                f"({name!r}, None)"
            )
        devices = math.prod(sizes[axis] for axis in each(axes) if axis in free)
        if size % devices and (name == "kv_heads" or (size == 1 and name in _TOKENS)):
            # Each device has them all: of key/value heads its queries take the ones they need,
            # and one row or one token can't be divided.
            axes = None
        elif size % devices:
            legal = [n for n in range(1, size + 1) if size % n == 0]
            raise ValueError(
                f"{name!r} counts {size}, which does not divide over the {devices} devices of the "
                f"mesh axis {axes!r}; choose a multiple of {devices}, or an axis of one of {legal}"
            )
        parts.append(axes)
    return PartitionSpec(*parts)


def _rules() -> tuple[tuple[str, Any], ...]:
    """Flax's rules; key/value heads without one go where query heads go."""
    rules = tuple(nn.get_logical_axis_rules())
    if not has_rule("kv_heads"):
        rules += tuple(("kv_heads", axes) for name, axes in rules if name == "heads")
    return rules


def has_rule(name: str) -> bool:
    """Whether the rules say anything of that name."""
    return any(rule == name for rule, _ in nn.get_logical_axis_rules())


def each(axes: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a PartitionSpec; of `UNCONSTRAINED` none is known."""
    if axes is None or axes is UNCONSTRAINED:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def entry(axes: Sequence[str]) -> Any:
    """Mesh axes as an entry of a PartitionSpec."""
    return axes[0] if len(axes) == 1 else tuple(axes) or None


def whole_steps(path: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a call of a module: where its attention layer decodes, tokens are not divided.

    A step of decoding has one token, a prompt any number, whatever the rules divide in training.
    Rows and heads are divided as ever.

    Args:
      path: from the module to the layer, such as "block.attention".
    """

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(call)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            rules = nn.get_logical_axis_rules()
            layer: Any = args[0]
            for name in path.split("."):
                # Whether the fields are what they should be is checked later.
                layer = getattr(layer, name, None) if name else layer
            if not rules or not getattr(layer, "decode", False):
                return call(*args, **kwargs)
            tokens = ("length", "norm_length")
            with nn.logical_axis_rules(
                [(name, None if name in tokens else axes) for name, axes in rules]
            ):
                return call(*args, **kwargs)

        return run

    return decorate


def only(spec: PartitionSpec, kept: Collection[str]) -> PartitionSpec:
    """The spec without the mesh axes that are not among those."""
    return PartitionSpec(
        *(part if part is UNCONSTRAINED else entry([axis for axis in each(part) if axis in kept])
          for part in spec)
    )  # fmt: skip


def filled(spec: PartitionSpec, own: Iterable[Any] = ()) -> PartitionSpec:
    """The spec with its unconstrained entries as in `own`, where their mesh axes are free."""
    taken = {axis for part in spec for axis in each(part)}
    parts = [
        entry([axis for axis in each(mine) if axis not in taken]) if part is UNCONSTRAINED else part
        for part, mine in itertools.zip_longest(spec, own)
    ]
    return PartitionSpec(*parts)


def manual(specs: Iterable[PartitionSpec], mesh: AbstractMesh) -> set[str]:
    """Return the mesh axes over which `jax.shard_map` divides arrays laid out by these specs.

    Over Auto axes that no spec names the compiler may have divided unconstrained axes. To keep
    that, these axes are left to the compiler inside, too, but for those of one device: there is
    nothing to divide, and Mosaic's kernels run only where no axis is left.
    """
    parts = [part for spec in specs for part in spec]
    named = {axis for part in parts for axis in each(part)}
    unknown = any(part is UNCONSTRAINED for part in parts)
    found = {*mesh.explicit_axes, *(a for a in mesh.auto_axes if a in named or not unknown)}
    return found and found | {a for a in mesh.auto_axes if mesh.shape[a] == 1}


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
    return jax.sharding.reshard(x, filled(only(spec, explicit), spec_of(x)))


def spec_of(x: jax.Array) -> PartitionSpec:
    """How x is divided over Explicit axes, an entry for each of its axes."""
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    spec = only(jax.typeof(x).sharding.spec, explicit)
    return PartitionSpec(*spec, *[None] * (x.ndim - len(spec)))


def over(fn: Callable[..., Any], manual: set[str], ins: Any, outs: Any, *args: Any) -> Any:
    """fn(*args) on each device's shards along some mesh axes; the others stay as they are.

    Args:
      fn: of arrays, on Manual axes.
      manual: those mesh axes.
      ins: PartitionSpecs of args.
      outs: those of the result.
      *args: arrays, on Explicit axes laid out so.
    """
    if not manual:
        return fn(*args)
    # Where the caller's own `jax.shard_map` has JAX check what varies, gradients need it here too.
    checked = any(varying(x) for x in jax.tree.leaves(args))
    if checked:
        # XLA refuses the residuals of one `jax.shard_map` in another that do vary.
        fn = jax.checkpoint(fn)
    shards = jax.shard_map(
        fn, axis_names=manual, in_specs=tuple(ins), out_specs=outs, check_vma=checked
    )
    mesh = jax.sharding.get_abstract_mesh()
    # Where axes are left, JAX 0.10 does not run it outside jit.
    shards = shards if manual == {*mesh.axis_names} else jax.jit(shards)
    return shards(*args)


def warn_of_unseen_mesh() -> None:
    """Warns of `with mesh:`, which sets no mesh that rules could be used on."""
    try:
        # JAX has no public name for such a mesh, but takes a PartitionSpec only under some mesh.
        jax.lax.with_sharding_constraint(np.float32(0), PartitionSpec())
    except (RuntimeError, ValueError):
        return
    inputs.warn(
        "logical axis rules divide nothing under `with mesh:`, which JAX has deprecated; "
        "write `with jax.set_mesh(mesh):`"
    )


def varying(x: Any) -> frozenset[str]:
    """The mesh axes over which x varies, inside a `jax.shard_map` that keeps count (check_vma)."""
    # JAX has no public name for it, and has changed it once.
    kind = jax.typeof(x)
    return getattr(getattr(kind, "mat", None), "varying", getattr(kind, "vma", frozenset()))


def zigzag(length: int, devices: int) -> np.ndarray:
    """The order of tokens in which devices have like work under a causal mask.

    Device i of n has pieces i and 2n − 1 − i of 2n: an early one that sees little and a late one
    that sees much.

    >>> order = sharding.zigzag(x.shape[1], 8)
    >>> y = layer.apply(variables, x[:, order], order=order)[:, np.argsort(order)]

    Args:
      length: T.
      devices: n.

    Returns:
      int32 [T]: the positions of the tokens.

    Raises:
      ValueError: if T is not a positive multiple of 2n.
      TypeError: if either is no int.

    Source: the zig-zag placement of ring-flash-attention (Zhu, 2024), and of Grattafiori et al.,
    "The Llama 3 Herd of Models", 2024.
    """
    inputs.positive(length=length, devices=devices)
    if length % (2 * devices):
        raise ValueError(
            f"zigzag places 2 pieces on each of {devices} devices, got {length} tokens; "
            f"pad them to a multiple of {2 * devices}"
        )
    pieces = np.arange(length, dtype=np.int32).reshape(2, devices, -1)
    return np.stack([pieces[0], pieces[1, ::-1]], 1).reshape(-1)
