"""Which mesh axes divide an array, by the rules, and whether they can."""

import contextlib
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias

import flax.linen as nn
from jax.sharding import AbstractMesh, PartitionSpec

LogicalNames: TypeAlias = tuple[str | None, ...]
# What a PartitionSpec says of an axis that is to stay as it is.
UNCONSTRAINED = PartitionSpec.UNCONSTRAINED
# One row or one token can't be divided, and need not be.
_TOKENS = ("batch", "length", "norm_length")


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
    mesh_axes = nn.logical_to_mesh_axes(names, rules) or PartitionSpec()
    for size, name, axes in zip(shape, names, mesh_axes, strict=True):
        choices = [given for rule, given in rules if rule == name]
        if name is not None and not choices:
            parts.append(UNCONSTRAINED)
            continue
        unknown = sorted({axis for given in choices for axis in each(given)} - set(sizes))
        if unknown:
            raise ValueError(
                f"the rule {(name, choices[0])} names the mesh axis {unknown}, and the mesh has "
                f"{sizes}; make it with that axis (a size of 1 will do), or change the rule"
            )
        if axes is None and choices and None not in choices:
            raise ValueError(
                f"{name!r} is to be divided over {choices[0]!r}, which another axis of the same "
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


def only(spec: PartitionSpec, kept: Collection[str]) -> PartitionSpec:
    """The spec without the mesh axes that are not among those."""
    return PartitionSpec(
        *(part if part is UNCONSTRAINED else entry([axis for axis in each(part) if axis in kept])
          for part in spec)
    )  # fmt: skip


def filled(spec: PartitionSpec, default: Iterable[Any] = ()) -> PartitionSpec:
    """The spec with its unconstrained entries as in `own`, where their mesh axes are free."""
    taken = {axis for part in spec for axis in each(part)}
    parts = [
        entry([axis for axis in each(mine) if axis not in taken]) if part is UNCONSTRAINED else part
        for part, mine in itertools.zip_longest(spec, default)
    ]
    return PartitionSpec(*parts)


def undivided_tokens(decode: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context whose rules divide no tokens where a layer decodes; else one that is empty.

    A step of decoding has one token, a prompt any number, whatever the rules divide in training.
    Rows and heads are divided as ever.
    """
    rules = nn.get_logical_axis_rules()
    if not rules or not decode:
        return contextlib.nullcontext()
    tokens = ("length", "norm_length")
    whole = [(name, None if name in tokens else axes) for name, axes in rules]
    return nn.logical_axis_rules(whole)
