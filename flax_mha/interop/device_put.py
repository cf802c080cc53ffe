"""Copies of arrays in mapped files to memory and to devices."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# A CPU device uses an array without a copy if its address is a multiple of this number of bytes.
_ALIGNMENT = 64


def place(dtype: Any, x: Any, sharding: jax.sharding.Sharding | None) -> Any:
    """Return a parameter as a NumPy array, or on devices.

    `jax.make_array_from_callback` would hold all shards in the host's memory at once, and on a CPU
    it may return an array that shares the file's pages, so that it changes with the file.

    Args:
      dtype: the dtype of the result if x is floating; None for x's dtype.
      x: a view of a mapped file, or a list of views that are concatenated on the first axis.
      sharding: the sharding of the result; None for a NumPy array.
    """
    views = x if isinstance(x, list) else [x]
    kept = np.result_type(*views)
    dtype = dtype if dtype is not None and jnp.issubdtype(kept, jnp.floating) else kept
    shape = views[0].shape
    if len(views) > 1:
        shape = (sum(map(len, views)), *shape[1:])
    if sharding is None:
        return _read(views, (slice(None),) * len(shape), dtype)
    # Wait for each device, so that the host holds one shard at a time.
    shards = [
        jax.block_until_ready(jax.device_put(_read(views, index, dtype), device))
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _read(views: Sequence[np.ndarray], index: tuple[slice, ...], dtype: Any) -> np.ndarray:
    """Return a slice of the concatenation of views, at an aligned address."""
    parts = [views[0][index]]
    if len(views) > 1:
        rows = [row for view in views for row in view][index[0]]
        parts = [row[(None, *index[1:])] for row in rows]
    shape = parts[0].shape
    if len(parts) > 1:
        shape = (len(parts), *shape[1:])
    size = math.prod(shape) * np.dtype(dtype).itemsize
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    out = buffer[start : start + size].view(dtype).reshape(shape)
    for i, part in enumerate(parts):
        _copy(out[i : i + 1] if len(parts) > 1 else out, part)
    return out


def _copy(out: np.ndarray, view: np.ndarray) -> None:
    if out.dtype == view.dtype:
        # NumPy copies integers faster than bfloat16.
        out, view = (x.view(f"u{x.dtype.itemsize}") for x in (out, view))
    if out.ndim < 2 or view.strides[-1] == view.itemsize:
        out[...] = view
        return
    # A transposed matrix is copied one cache line of the file at a time: 2 to 4 times faster.
    columns = max(1, 64 // view.itemsize)
    for i in range(0, out.shape[-1], columns):
        out[..., i : i + columns] = view[..., i : i + columns]


def equal(x: np.ndarray, y: np.ndarray) -> bool:
    """Return True if two arrays have the same bits."""
    x, y = np.asarray(x), np.asarray(y)
    if x is y or (x.shape, x.dtype) != (y.shape, y.dtype):
        return x is y
    # One row at a time, as the result of a comparison would take memory for all of them.
    return all(a.tobytes() == b.tobytes() for a, b in zip(x, y, strict=True))
