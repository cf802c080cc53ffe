"""Arrays of files to devices, with no more in the host's memory than one of their parts."""

import functools
import itertools
import math
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha.base.shapes import Shape

# Bytes of a file that are read at once.
_AT_ONCE = 2**22
# Rows and columns that are transposed at once, so that both stay in a cache.
_TILE = 64
# Bytes. Where one were too few, arrays would be copied, which a test of memory would see.
_ALIGNMENT = 64


class Joined:
    """Arrays one after another on the first axis, which are joined when they are read."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self._parts = parts
        self.shape = (sum(map(len, parts)), *parts[0].shape[1:])
        self.dtype = np.result_type(*parts)

    def views(self, index: tuple[slice, ...]) -> Iterator[np.ndarray]:
        """Yield the part of each array that lies there."""
        first, last, _ = index[0].indices(self.shape[0])
        for part in self._parts:
            here = part[(slice(max(first, 0), max(last, 0)), *index[1:])]
            if len(here):
                yield here
            first, last = first - len(part), last - len(part)


def place(dtype: Any, x: Any, sharding: jax.sharding.Sharding | None) -> Any:
    """Return an array or a `Joined` in a dtype (None: its own), on devices (None: in NumPy)."""
    dtype = dtype if dtype is not None and jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    if sharding is None:
        return _read(x, (slice(None),) * len(x.shape), dtype)
    # One device after another, so that no more than one part is in the host's memory.
    places = sharding.addressable_devices_indices_map(x.shape)
    parts = [
        jax.block_until_ready(jax.device_put(_read(x, index, dtype), device))
        for device, index in places.items()
    ]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)


def _read(x: Any, index: Any, dtype: Any) -> np.ndarray:
    views = [*x.views(index)] if isinstance(x, Joined) else [x[index]]
    rows = (sum(map(len, views)),) if x.shape else ()
    out, at = _aligned((*rows, *views[0].shape[1:]), dtype), 0
    for view in views:
        _fill(out[at : at + len(view)] if rows else out, view)
        at += len(view) if rows else 0
    return out


def _aligned(shape: Shape, dtype: Any) -> np.ndarray:
    """Make an array that begins where a CPU device takes it as it is, without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.empty(size + _ALIGNMENT, np.uint8)
    skip = -room.__array_interface__["data"][0] % _ALIGNMENT
    return room[skip : skip + size].view(dtype).reshape(shape)


def _fill(out: np.ndarray, source: np.ndarray) -> None:
    """Copy by pieces that lie together in the file, whatever the order of axes."""
    pieces = [*_pieces(*_merged(out, source))]
    if len(pieces) > 1:
        # Reads the results, which raises if one failed.
        [*_threads().map(_copy, pieces)]
    else:
        _copy(*pieces)


def _pieces(out: np.ndarray, source: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    spans = [(n - 1) * abs(step) for n, step in zip(source.shape, source.strides, strict=True)]
    if sum(spans) <= _AT_ONCE:
        yield out, source
        return
    axis = int(np.argmax(spans))
    for half in (slice(source.shape[axis] // 2), slice(source.shape[axis] // 2, None)):
        at = (slice(None),) * axis + (half,)
        yield from _pieces(out[at], source[at])


def _merged(*arrays: np.ndarray) -> list[np.ndarray]:
    """Return arrays of one shape with axes joined that lie one after another in all of them."""
    for axis in reversed(range(arrays[0].ndim - 1)):
        n, m = arrays[0].shape[axis : axis + 2]
        if all(x.strides[axis] == m * x.strides[axis + 1] for x in arrays):
            shape = (*arrays[0].shape[:axis], n * m, *arrays[0].shape[axis + 2 :])
            arrays = tuple(x.reshape(shape) for x in arrays)
    return [*arrays]


def _copy(pair: tuple[np.ndarray, np.ndarray]) -> None:
    """Copy a piece, tile by tile if its order changes."""
    out, source = pair
    loaded = in_memory(source)
    if out.dtype == loaded.dtype:
        out, loaded = _bits(out), _bits(loaded)
    fast = [int(np.argmin(np.abs(x.strides))) for x in (out, loaded)] if out.ndim else [0, 0]
    if fast[0] == fast[1]:
        out[...] = loaded
        return
    for i, j in itertools.product(*(range(0, out.shape[axis], _TILE) for axis in fast)):
        at = [slice(None)] * out.ndim
        at[fast[0]], at[fast[1]] = slice(i, i + _TILE), slice(j, j + _TILE)
        out[tuple(at)] = loaded[tuple(at)]


def in_memory(x: np.ndarray) -> np.ndarray:
    """Return a piece of a file in memory that this thread uses again for the next one.

    Pages of a mapped file would count as memory of the process, and take time to give back.
    """
    whole: Any = x
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    descriptor = getattr(whole, "descriptor", None)
    if descriptor is None or not hasattr(os, "preadv"):
        return x
    begin = x.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    size = sum((n - 1) * step for n, step in zip(x.shape, x.strides, strict=True)) + x.itemsize
    if getattr(_ROOM, "bytes", _NONE).size < size:
        _ROOM.bytes = np.empty(size, np.uint8)
    room = memoryview(_ROOM.bytes)[:size]
    while room:
        count = os.preadv(descriptor, [room], begin)
        if not count:
            raise ValueError("the file must stay as it is while it is read, and is shorter now")
        room, begin = room[count:], begin + count
    return np.ndarray(x.shape, x.dtype, _ROOM.bytes, 0, x.strides)


_NONE, _ROOM = np.empty(0, np.uint8), threading.local()


def equal(x: np.ndarray, y: np.ndarray) -> bool:
    """Return True if two arrays are the same to the bit, piece by piece."""
    if x is y:
        return True
    x, y = np.asarray(x), np.asarray(y)
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return False
    rows = max(1, _AT_ONCE * len(x) // max(x.nbytes, 1))
    for at in range(0, len(x), rows):
        # The second takes the place of the first.
        one = in_memory(x[at : at + rows]).tobytes()
        if one != in_memory(y[at : at + rows]).tobytes():
            return False
    return True


def _bits(x: np.ndarray) -> np.ndarray:
    """Return the same as whole numbers, which NumPy copies and compares faster than bfloat16."""
    return x.view(f"u{x.dtype.itemsize}")


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return threads that copy: NumPy lets others go on meanwhile."""
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), "flax_mha-load")
