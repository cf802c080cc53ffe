"""Look-ups in tables, in a kernel for Hopper: selections among the entries."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from flax_mha.kernels.flex.function import UnsupportedPrimitive, index_columns, where
from flax_mha.kernels.flex.hopper.lazy_arrays import LazyTable, Spread, as_spread, merge_axes

# The maximum entries of a look-up by a tile of indices, because each is an unrolled selection.
ENTRIES = 256


def gather(eqn: Any, table: Any, index: Any) -> Any:
    """Look up entries of a table by an index for each axis."""
    shape, out, params = eqn.invars[0].aval.shape, eqn.outvars[0].aval, eqn.params
    numbers, mode = params["dimension_numbers"], params["mode"]
    order, rows = numbers.start_index_map, tuple(numbers.operand_batching_dims)
    if sorted((*rows, *order)) != list(range(len(shape))) or numbers.offset_dims:
        raise UnsupportedPrimitive("gather")
    columns = [as_spread(x) for x in index_columns(index, eqn.invars[1])]
    if rows:
        table, shape = _of_rows(table, rows, numbers, [x.axes for x in columns]), (1, *shape[1:])
    found: dict[int, Any] = {}
    for axis, x in zip(order, columns, strict=True):
        i = x.x.astype(jnp.int32)
        clipped = mode == lax.GatherScatterMode.CLIP
        found[axis] = jnp.clip(i, 0, shape[axis] - 1) if clipped else i
    if not isinstance(table, LazyTable):
        number = as_spread(table).x
        table = LazyTable(shape, lambda index: number)
    value = _lookup(table, found)
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        fill = jnp.nan if params["fill_value"] is None else params["fill_value"]
        inside: Any = True
        for axis, i in found.items():
            inside = inside & (i >= 0) & (i < shape[axis])
        value = where(inside, value, jnp.asarray(fill, value.dtype))
    axes = [x.axes if len(x.axes) == out.ndim else x.axes[:-1] for x in columns]
    merged = merge_axes("gather", axes, out.ndim)
    return Spread(value, (table.side, *merged[1:]) if rows else merged)


def _of_rows(table: Any, rows: tuple[int, ...], numbers: Any, axes: Sequence[Any]) -> LazyTable:
    """Return a table whose rows belong to queries or keys as one row, which has tiles for all."""
    is_rowwise = rows == tuple(numbers.start_indices_batching_dims) == (0,)
    if not is_rowwise or not isinstance(table, LazyTable) or not table.side:
        raise UnsupportedPrimitive("gather with rows")
    if any(x[0] not in ("", table.side) or table.side in x[1:] for x in axes):
        raise UnsupportedPrimitive("gather of queries with keys")
    return table._replace(shape=(1, *table.shape[1:]))


def _lookup(table: LazyTable, indices: dict[int, Any]) -> Any:
    wide = [axis for axis, i in indices.items() if jnp.ndim(i) and table.shape[axis] > 1]
    sizes = [table.shape[axis] for axis in wide]
    if math.prod(sizes) > ENTRIES:
        raise UnsupportedPrimitive(
            f"gather from {math.prod(sizes)} entries, of more than {ENTRIES},"
        )
    at: list[Any] = [
        jnp.clip(indices[n], 0, size - 1) if size > 1 and n not in wide else 0
        for n, size in enumerate(table.shape)
    ]
    if table.takes_tiles:
        return table.entry([indices[n] if n in wide else i for n, i in enumerate(at)])
    number: Any = 0
    for axis in wide:
        number = number * table.shape[axis] + indices[axis]
    entries = list(itertools.product(*map(range, sizes)))

    def choose(first: int, bit: int) -> Any:
        """Return the entry `number` of 2^bit entries from `first`, by its last bits."""
        if not bit:
            for axis, n in zip(wide, entries[first], strict=True):
                at[axis] = n
            return table.entry(at)
        half = 2 ** (bit - 1)
        low = choose(first, bit - 1)
        if first + half >= len(entries):
            return low
        return where((number & half) != 0, choose(first + half, bit - 1), low)

    return choose(0, max(len(entries) - 1, 0).bit_length())
