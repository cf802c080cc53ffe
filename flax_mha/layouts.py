"""Which mesh axes divide an array, by the rules, and whether they can; in which order."""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import flax.linen as nn
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec

from flax_mha import inputs

LogicalNames: TypeAlias = tuple[str | None, ...]

# One row or one token can't be divided, and need not be.
_TOKENS = ("batch", "length", "norm_length")


def checked(shape: Sequence[int], names: LogicalNames, mesh: AbstractMesh) -> PartitionSpec:
    """The mesh axes of each axis of an array, if it can be laid out so; names of its last axes."""
    if not isinstance(names, tuple | list) or not all(isinstance(n, str | None) for n in names):
        raise TypeError(
            f"names must be a tuple of logical names, a str or None for each axis, got {names!r}; "
            f"give ('batch', None), say"
        )
    names = (None,) * (len(shape) - len(names)) + tuple(names[max(len(names) - len(shape), 0) :])
    rules = nn.get_logical_axis_rules()
    sizes, free = dict(mesh.shape), (*mesh.auto_axes, *mesh.explicit_axes)
    parts: list[Any] = []
    found = nn.logical_to_mesh_axes(names, rules) or PartitionSpec()
    for size, name, axes in zip(shape, names, found, strict=True):
        wanted = [given for rule, given in rules if rule == name]
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


def each(axes: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a PartitionSpec."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def only(spec: PartitionSpec, kept: Sequence[str]) -> PartitionSpec:
    """The spec without the mesh axes that are not among those."""
    parts = (tuple(axis for axis in each(part) if axis in kept) for part in spec)
    return PartitionSpec(*(part[0] if len(part) == 1 else part or None for part in parts))


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
      ValueError: if T is not a multiple of 2n.

    Source: the zig-zag placement of ring-flash-attention (Zhu, 2024), and of Grattafiori et al.,
    "The Llama 3 Herd of Models", 2024.
    """
    inputs.positive(devices=devices)
    inputs.integer("length", length)
    if length % (2 * devices):
        raise ValueError(
            f"zigzag places 2 pieces on each of {devices} devices, got {length} tokens; "
            f"pad them to a multiple of {2 * devices}"
        )
    pieces = np.arange(length, dtype=np.int32).reshape(2, devices, -1)
    return np.stack([pieces[0], pieces[1, ::-1]], 1).reshape(-1)
