"""The logical axis rules, applied to arrays and checked."""

import contextlib
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias

import flax.linen as nn
from jax.sharding import AbstractMesh, PartitionSpec

LogicalNames: TypeAlias = tuple[str | None, ...]
# The entry of a PartitionSpec for an axis that keeps its sharding.
UNCONSTRAINED = PartitionSpec.UNCONSTRAINED
# Axes that are replicated if their size is 1.
_TOKENS = ("batch", "length", "norm_length")


def resolve_spec(shape: Sequence[int], names: LogicalNames, mesh: AbstractMesh) -> PartitionSpec:
    """Return the `PartitionSpec` of an array by the rules, given the names of its last axes."""
    last: Any = tuple(names[max(len(names) - len(shape), 0) :])
    names = (UNCONSTRAINED,) * (len(shape) - len(last)) + last
    # By default, key/value heads follow query heads, and slots are whole.
    rules = (*nn.get_logical_axis_rules(), ("cache_length", None))
    if not has_rule("kv_heads"):
        rules += tuple(("kv_heads", axes) for name, axes in rules if name == "heads")
    resolved = nn.logical_to_mesh_axes(names, rules) or PartitionSpec()
    entries = [
        _resolve_axis(size, name, axes, names, rules, mesh)
        for size, name, axes in zip(shape, names, resolved, strict=True)
    ]
    return PartitionSpec(*entries)


def _resolve_axis(
    size: int, name: Any, axes: Any, names: LogicalNames, rules: Sequence[tuple[str, Any]],
    mesh: AbstractMesh,
) -> Any:  # fmt: skip
    """Return the entry of one axis. `axes` are the mesh axes that Flax has resolved for it."""
    targets = [target for rule, target in rules if rule == name]
    if name is not None and not targets:
        return UNCONSTRAINED
    for target in targets:
        unknown = [axis for axis in unpack_entry(target) if axis not in mesh.axis_names]
        if unknown:
            raise ValueError(
                f"the rule {(name, target)} names the mesh axis {unknown}, and the mesh has "
                f"{dict(mesh.shape)}; make it with that axis (a size of 1 will do), or change the "
                f"rule"
            )
    if axes is None and targets and None not in targets:
        raise ValueError(
            f"{name!r} is to be sharded over {targets[0]!r}, which another axis of the same "
            f"array {names} already uses; give it another mesh axis, or the rule ({name!r}, None)"
        )
    free = (*mesh.auto_axes, *mesh.explicit_axes)
    devices = math.prod(mesh.shape[axis] for axis in unpack_entry(axes) if axis in free)
    if size % devices == 0:
        return axes
    if name == "kv_heads":
        # Devices share heads, and their queries pick the ones that they need.
        return leading_axes(axes, size, mesh)
    if size == 1 and name in _TOKENS:
        return None
    raise ValueError(
        f"{name!r} counts {size}, which does not divide over the {devices} devices of the mesh "
        f"axis {axes!r}; choose a multiple of {devices}, or another axis"
    )


def has_rule(name: str) -> bool:
    """Tell if there is a rule for a logical name."""
    return any(rule == name for rule, _ in nn.get_logical_axis_rules())


def unpack_entry(axes: Any) -> tuple[str, ...]:
    """Return the mesh axes of an entry of a PartitionSpec."""
    if axes is None or axes is UNCONSTRAINED:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def pack_entry(axes: Sequence[str]) -> Any:
    """Return mesh axes as an entry of a PartitionSpec."""
    return axes[0] if len(axes) == 1 else tuple(axes) or None


def leading_axes(axes: Any, size: int, mesh: AbstractMesh) -> Any:
    """Return the most leading mesh axes of an entry that divide `size`, or None."""
    leading = unpack_entry(axes)
    while size % math.prod(mesh.shape[axis] for axis in leading if axis not in mesh.manual_axes):
        leading = leading[:-1]
    return pack_entry(leading)


def keep_axes(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """Return a spec with only the mesh axes in `axes`."""
    return PartitionSpec(*(
        part if part is UNCONSTRAINED else pack_entry([a for a in unpack_entry(part) if a in axes])
        for part in spec
    ))  # fmt: skip


def fill_unconstrained(spec: PartitionSpec, default: Iterable[Any] = ()) -> PartitionSpec:
    """Replace the unconstrained entries of a spec by `default`, without mesh axes in use."""
    taken = {axis for part in spec for axis in unpack_entry(part)}
    return PartitionSpec(*(
        pack_entry([a for a in unpack_entry(axes) if a not in taken])
        if part is UNCONSTRAINED else part
        for part, axes in itertools.zip_longest(spec, default)
    ))  # fmt: skip


def undivided_tokens(decode: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the rules do not shard tokens, if `decode` is True."""
    rules = nn.get_logical_axis_rules()
    if not rules or not decode:
        return contextlib.nullcontext()
    tokens = ("length", "norm_length")
    return nn.logical_axis_rules([(name, None if name in tokens else axes) for name, axes in rules])
