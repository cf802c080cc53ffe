"""The arrays of functions of scores in a kernel for Hopper: tiles, numbers, and lazy tables."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from flax_mha.kernels.flex.function import IndexColumns, UnsupportedPrimitive


class Spread(NamedTuple):
    """A number, or a tile that stands for an array.

    Attributes:
      x: the number [] or the tile.
      axes: for each axis of the array, `q` or `k` if it varies along it, or an empty string.
    """

    x: Any
    axes: tuple[str, ...]


class LazyTable(NamedTuple):
    """An array whose entries are computed or loaded one by one.

    Attributes:
      shape: the shape.
      entry: the entry at an index, a sequence of numbers.
      takes_tiles: True if an index may be a tile of numbers too.
      side: `q` or `k` if each query or key has a row of its own, the first axis. An entry is a tile
        of the entries of all its rows then.
    """

    shape: tuple[int, ...]
    entry: Callable[[Sequence[Any]], Any]
    takes_tiles: bool = False
    side: str = ""


class OneHot(NamedTuple):
    """A table of zeros, with 1 in entries of one number along some axes.

    Attributes:
      table: the table.
      others: the indices along the other axes, once for each look-up so far.
    """

    table: LazyTable
    others: list[list[Any]]


def one_hot(shape: tuple[int, ...], axes: Sequence[int], number: Any, side: str = "") -> OneHot:
    """Return a table of 1 where the index along some axes has this number, in C order, and 0."""
    others: list[list[Any]] = []

    def entry(index: Sequence[Any]) -> Any:
        others.append([i for axis, i in enumerate(index) if axis not in axes])
        at: Any = 0
        for axis in axes:
            at = at * shape[axis] + index[axis]
        return (at == number).astype(jnp.float32)

    return OneHot(LazyTable(shape, entry, takes_tiles=True, side=side), others)


def as_number(table: LazyTable, shape: Sequence[int]) -> Spread:
    """Return a table of one entry as a number."""
    return Spread(table.entry((0,) * len(table.shape)), ("",) * len(shape))


def as_spread(x: Any) -> Spread:
    """Return a number or a tile as it is, and a literal or a table of one entry as a number."""
    if isinstance(x, Spread):
        return x
    if isinstance(x, LazyTable) and math.prod(x.shape) == 1:
        return as_number(x, x.shape)
    if isinstance(x, LazyTable | IndexColumns):
        raise UnsupportedPrimitive("an array that is neither over the scores nor looked up")
    return Spread(jnp.asarray(np.asarray(x).reshape(())), ("",) * np.ndim(x))


def entry_of(x: Any, index: Sequence[Any]) -> Any:
    """Return the entry of a table, or a number, at an index of a broadcast shape."""
    if isinstance(x, LazyTable):
        return x.entry([i if n > 1 else 0 for i, n in zip(index, x.shape, strict=True)])
    x = as_spread(x)
    if any(x.axes):
        raise UnsupportedPrimitive("an operation on a table and an array over the scores")
    return x.x


def merge_axes(name: str, axes: Sequence[tuple[str, ...]], ndim: int) -> tuple[str, ...]:
    """Return the axes of the result of an operation on arrays with these axes."""
    merged = []
    for some in zip(*(x for x in axes if len(x) == ndim), strict=True):
        kinds = {*some} - {""}
        if len(kinds) > 1:
            raise UnsupportedPrimitive(f"{name} of queries with keys")
        merged.append(kinds.pop() if kinds else "")
    return tuple(merged) or ("",) * ndim


def reshape_table(x: LazyTable, shape: Sequence[int]) -> LazyTable:
    """Return a table with axes of one entry added or removed."""
    if [n for n in x.shape if n > 1] != [n for n in shape if n > 1]:
        raise UnsupportedPrimitive("reshape")

    def entry(index: Sequence[Any]) -> Any:
        kept = (i for i, n in zip(index, shape, strict=True) if n > 1)
        return x.entry([next(kept) if n > 1 else 0 for n in x.shape])

    side = x.side if x.shape == tuple(shape) else ""
    return LazyTable(tuple(shape), entry, x.takes_tiles, side)
