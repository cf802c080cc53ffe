"""Transfer of arrays from files to devices, with one shard at a time in the host's memory."""

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

# The most bytes of a file that are read at once.
_BLOCK_BYTES = 2**22
# The rows and columns that are transposed at once, so that both stay in the CPU's cache.
_TILE = 64
# The alignment in bytes with which a CPU device takes an array without a copy.
_ALIGNMENT = 64


class Joined:
    """A lazy concatenation of arrays on the first axis."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self._parts = parts
        self.shape = (sum(map(len, parts)), *parts[0].shape[1:])
        self.dtype = np.result_type(*parts)

    def views(self, index: tuple[slice, ...]) -> Iterator[np.ndarray]:
        """Yield the slices of the arrays that make up an index of the concatenation."""
        first, last, _ = index[0].indices(self.shape[0])
        for part in self._parts:
            view = part[(slice(max(first, 0), max(last, 0)), *index[1:])]
            if len(view):
                yield view
            first, last = first - len(part), last - len(part)


def place(dtype: Any, x: Any, sharding: jax.sharding.Sharding | None) -> Any:
    """Read an array into memory or onto devices.

    Args:
      dtype: the dtype of the result, if x is floating; None for x's dtype.
      x: a mapped array or a `Joined`.
      sharding: the sharding of the result; None for a NumPy array.
    """
    dtype = dtype if dtype is not None and jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    if sharding is None:
        return _read(x, (slice(None),) * len(x.shape), dtype)
    # Wait for each device, so that at most one shard is in the host's memory.
    indices = sharding.addressable_devices_indices_map(x.shape)
    shards = [
        jax.block_until_ready(jax.device_put(_read(x, index, dtype), device))
        for device, index in indices.items()
    ]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)


def _read(x: Any, index: Any, dtype: Any) -> np.ndarray:
    views = [*x.views(index)] if isinstance(x, Joined) else [x[index]]
    rows = (sum(map(len, views)),) if x.shape else ()
    shape = (*rows, *views[0].shape[1:])
    # Align the array for a CPU device.
    size = math.prod(shape) * np.dtype(dtype).itemsize
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    skip = -buffer.__array_interface__["data"][0] % _ALIGNMENT
    out, start = buffer[skip : skip + size].view(dtype).reshape(shape), 0
    for view in views:
        _fill(out[start : start + len(view)] if rows else out, view)
        start += len(view) if rows else 0
    return out


def _fill(out: np.ndarray, source: np.ndarray) -> None:
    """Copy an array in blocks that are contiguous in the file, for any order of axes."""
    blocks = [*_split(*_merge_axes(out, source))]
    if len(blocks) > 1:
        # Reading the results raises the errors of the threads.
        [*_threads().map(_copy, blocks)]
    else:
        _copy(*blocks)


def _split(out: np.ndarray, source: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    spans = [(n - 1) * abs(step) for n, step in zip(source.shape, source.strides, strict=True)]
    if sum(spans) <= _BLOCK_BYTES:
        yield out, source
        return
    axis = int(np.argmax(spans))
    for half in (slice(source.shape[axis] // 2), slice(source.shape[axis] // 2, None)):
        index = (slice(None),) * axis + (half,)
        yield from _split(out[index], source[index])


def _merge_axes(*arrays: np.ndarray) -> list[np.ndarray]:
    """Merge the axes that are contiguous in all arrays, which have the same shape."""
    for axis in reversed(range(arrays[0].ndim - 1)):
        n, m = arrays[0].shape[axis : axis + 2]
        if all(x.strides[axis] == m * x.strides[axis + 1] for x in arrays):
            shape = (*arrays[0].shape[:axis], n * m, *arrays[0].shape[axis + 2 :])
            arrays = tuple(x.reshape(shape) for x in arrays)
    return [*arrays]


def _copy(pair: tuple[np.ndarray, np.ndarray]) -> None:
    """Copy a block, in tiles if the order of axes changes."""
    out, source = pair
    loaded = in_memory(source)
    if out.dtype == loaded.dtype:
        # NumPy copies integers faster than bfloat16.
        out, loaded = (x.view(f"u{x.dtype.itemsize}") for x in (out, loaded))
    fast = [int(np.argmin(np.abs(x.strides))) for x in (out, loaded)] if out.ndim else [0, 0]
    if fast[0] == fast[1]:
        out[...] = loaded
        return
    for i, j in itertools.product(*(range(0, out.shape[axis], _TILE) for axis in fast)):
        index = [slice(None)] * out.ndim
        index[fast[0]], index[fast[1]] = slice(i, i + _TILE), slice(j, j + _TILE)
        out[tuple(index)] = loaded[tuple(index)]


def in_memory(x: np.ndarray) -> np.ndarray:
    """Read a block of a file into a buffer that this thread reuses for the next block.

    Pages of a mapped file would count as memory of the process, and are slow to release.
    """
    mapped: Any = x
    while isinstance(mapped.base, np.ndarray):
        mapped = mapped.base
    descriptor = getattr(mapped, "descriptor", None)
    if descriptor is None or not hasattr(os, "preadv"):
        return x
    offset = x.__array_interface__["data"][0] - mapped.__array_interface__["data"][0]
    size = sum((n - 1) * step for n, step in zip(x.shape, x.strides, strict=True)) + x.itemsize
    if getattr(_BUFFER, "bytes", np.empty(0)).size < size:
        _BUFFER.bytes = np.empty(size, np.uint8)
    unread = memoryview(_BUFFER.bytes)[:size]
    while unread:
        count = os.preadv(descriptor, [unread], offset)
        if not count:
            raise ValueError("the file must not change while it is read, and is shorter now")
        unread, offset = unread[count:], offset + count
    return np.ndarray(x.shape, x.dtype, _BUFFER.bytes, 0, x.strides)


_BUFFER = threading.local()


def equal(x: np.ndarray, y: np.ndarray) -> bool:
    """Return True if two arrays have the same bits, reading them in blocks."""
    if x is y:
        return True
    x, y = np.asarray(x), np.asarray(y)
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return False
    rows = max(1, _BLOCK_BYTES * len(x) // max(x.nbytes, 1))
    for i in range(0, len(x), rows):
        # Copy the first block, as the second one overwrites the buffer.
        block = in_memory(x[i : i + rows]).tobytes()
        if block != in_memory(y[i : i + rows]).tobytes():
            return False
    return True


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return the threads for copies, which run in parallel as NumPy releases the GIL."""
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), "flax_mha-load")
