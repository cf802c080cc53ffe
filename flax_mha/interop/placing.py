"""Arrays of files to devices, with no more in the host's memory than one of their parts."""

import math
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha.shapes import Shape

# So many bytes of a file are looked at before its pages are given back.
_AT_ONCE = 2**22
# Bytes. Where one were too few, arrays would be copied, which a test of memory would see.
_ALIGNMENT = 64


class Joined:
    """Arrays one after another on the first axis, which are joined when they are read."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self._parts = parts
        self.shape = (sum(map(len, parts)), *parts[0].shape[1:])
        self.dtype = np.result_type(*parts)

    def views(self, index: tuple[slice, ...]) -> Iterator[np.ndarray]:
        """What lies there, of each array."""
        first, last, _ = index[0].indices(self.shape[0])
        for part in self._parts:
            here = part[(slice(max(first, 0), max(last, 0)), *index[1:])]
            if len(here):
                yield here
            first, last = first - len(part), last - len(part)


def place(dtype: Any, x: Any, sharding: jax.sharding.Sharding | None) -> Any:
    """An array, or a `Joined`, in a dtype (None: its own) on devices (None: in NumPy)."""
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
    """An array that begins where a CPU device takes it as it is, and makes no copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.empty(size + _ALIGNMENT, np.uint8)
    skip = -room.__array_interface__["data"][0] % _ALIGNMENT
    return room[skip : skip + size].view(dtype).reshape(shape)


def _fill(out: np.ndarray, source: np.ndarray) -> None:
    """Copies by pieces that lie together in the file, whatever the order of axes."""
    spans = [(n - 1) * abs(step) for n, step in zip(source.shape, source.strides, strict=True)]
    if sum(spans) <= _AT_ONCE:
        out[...] = source
        _let_go(source, sum(spans) + source.itemsize)
        return
    axis = int(np.argmax(spans))
    for half in (slice(source.shape[axis] // 2), slice(source.shape[axis] // 2, None)):
        at = (slice(None),) * axis + (half,)
        _fill(out[at], source[at])


def _let_go(x: np.ndarray, size: int) -> None:
    """Gives the pages of a mapped file back, which would count as memory of the process."""
    whole: Any = x
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    if isinstance(whole.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        begin = x.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
        first = begin - begin % mmap.PAGESIZE
        whole.base.madvise(mmap.MADV_DONTNEED, first, begin + size - first)


def equal(x: np.ndarray, y: np.ndarray) -> bool:
    """Return True if two arrays are the same to the bit, piece by piece."""
    if x is y:
        return True
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return False
    rows = max(1, _AT_ONCE * len(x) // max(x.nbytes, 1))
    for at in range(0, len(x), rows):
        both = [_bits(each[at : at + rows]) for each in (x, y)]
        if not np.array_equal(*both):
            return False
        for each in both:
            _let_go(each, each.nbytes)
    return True


def _bits(x: np.ndarray) -> np.ndarray:
    """Return the same as whole numbers, which NumPy copies and compares faster than bfloat16."""
    return x.view(f"u{x.dtype.itemsize}")
