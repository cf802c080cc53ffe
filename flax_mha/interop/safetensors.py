"""Tensors in safetensors files, memory-mapped: what is not looked at is not read.

The library `safetensors` gives slices along the axes of a tensor as it lies; here views are needed,
which can be transposed and cut before anything is read.

Source of the format: https://github.com/huggingface/safetensors, "Format".
"""

import collections
import json
import math
import os
import stat
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from flax_mha.interop.settings import several, shown

_DTYPES: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
    "BOOL": np.bool_,
}  # fmt: skip
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Bytes of a header, as the format has it, and of files of JSON.
_MOST = 100_000_000
# Of an array of NumPy.
_MOST_AXES = 32


def read_folder(path: Path) -> dict[str, np.ndarray]:
    """Return all tensors of a folder, of one file or of an index of several."""
    if (path / _ONE).is_file():
        return read(path / _ONE)
    if not (path / _INDEX).is_file():
        raise FileNotFoundError(
            f"{path} has neither {_ONE} nor {_INDEX}; weights in other formats (pickles may run "
            f"code) have to be saved as safetensors first"
        )
    index = read_json(path / _INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(x, str) for x in index.values()):
        raise ValueError(f"{path / _INDEX} must have a weight_map from tensors to files")
    tensors: dict[str, np.ndarray] = {}
    for name in sorted({*index.values()}):
        if name != os.path.basename(name) or not name.isprintable():
            raise ValueError(f"{path / _INDEX} must name files beside it, got {shown(name)}")
        try:
            part = read(path / name)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{path / _INDEX} names the file {shown(name)}, which is not there; fetch it too"
            ) from None
        # Of a tensor in two files the one counts that the index names.
        tensors |= {key: x for key, x in part.items() if index.get(key, name) == name}
    lacking = sorted(index.keys() - tensors.keys())
    if lacking:
        raise ValueError(f"{path / _INDEX} names tensors that its files lack: {several(lacking)}")
    return tensors


def read(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file, as views of it.

    Raises:
      ValueError: if it is no such file, or not whole.
    """
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST):
            raise ValueError(f"{path} is no whole safetensors file of {size} bytes; fetch it again")
        header, at = _parsed(path, file.read(length)), 8 + length
        data: Any = np.memmap(file, np.uint8, "r") if size > at else np.zeros(at, np.uint8)
        if size > at:
            # By which pieces are read, for as long as there are views of it.
            data.descriptor = os.dup(file.fileno())
            weakref.finalize(data, os.close, data.descriptor)
    said = header.pop("__metadata__", {})
    if not isinstance(said, dict) or not all(isinstance(x, str) for x in said.values()):
        raise ValueError(
            f"{path}: its __metadata__ must be an object of strings, got {shown(said)}; fetch it "
            f"again"
        )
    entries = sorted((_entry(path, name, x) for name, x in header.items()), key=lambda x: x[3:])
    tensors = {}
    for name, dtype, shape, begin, end in entries:
        # One after another, so that no byte is in two of them, or in none.
        first, last = at, at + math.prod(shape) * dtype.itemsize
        at += end - begin
        if (begin + 8 + length, at) != (first, last) or last > size:
            raise ValueError(
                f"{path}: tensor {name}, {dtype}{list(shape)}, must lie at {first} … {last} of the "
                f"file's {size} bytes, where the one before it ends, its offsets are {begin} … "
                f"{end} after {8 + length}; fetch it again"
            )
        tensors[name] = data[first:last].view(dtype).reshape(shape)
    if at != size:
        raise ValueError(
            f"{path} must end with its last tensor, after {at} bytes, got {size}; fetch it again"
        )
    # As the header names them.
    return {name: tensors[name] for name in header}


def _entry(path: Path, name: str, entry: Any) -> tuple[str, Any, tuple[int, ...], int, int]:
    """Return the header's entry of a tensor: name, dtype, shape, and where it begins and ends."""
    try:
        dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        is_sound = name.isprintable() and len(shape) <= _MOST_AXES
        is_sound &= all(type(x) is int and x >= 0 for x in (*shape, begin, end))
        # NumPy counts what there were without an axis of 0, too.
        if is_sound and math.prod(x for x in shape if x) < 2**48:
            return name, dtype, shape, begin, end
    except (KeyError, TypeError, ValueError):
        pass
    raise ValueError(
        f"{path}: tensor {shown(name)} has no dtype, shape and data_offsets that can be read, got "
        f"{shown(entry)}; fetch it again"
    )


def write(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write a file of those tensors, arrays or `table.StoredTensor`, aside and then renamed."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, x in tensors.items():
        header[name] = {
            "dtype": _NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]
        }  # fmt: skip
        at += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    aside = path.with_name(path.name + ".part")
    with aside.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for x in tensors.values():
            array = x if isinstance(x, np.ndarray) else x.make()
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    aside.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file."""
    return _parsed(path, read_bytes(path))


def read_bytes(path: Path) -> bytes:
    """Return the content of a small file, such as a config or a tokenizer."""
    try:
        with _opened(path) as file:
            text = file.read(_MOST + 1)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} is not there; give the folder of a model, which has {path.name} and weights"
        ) from None
    if len(text) > _MOST:
        raise ValueError(f"{path} must have at most {_MOST} bytes, got more; fetch it again")
    return text


def _opened(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, to be closed; others may never end."""
    try:
        file = open(path, "rb", opener=_at_once)  # noqa: SIM115
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        told = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path} must be a file that can be read, got: {told}") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path} must be a regular file, got a pipe or a device; fetch it again")
    return file


def _at_once(path: str, flags: int) -> int:
    """Open a pipe, too, without waiting for who writes into it."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, its JSON can't be read: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(parsed).__name__}")
    return parsed


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object, of which no key may be there twice: readers would differ in which counts."""
    made = dict(pairs)
    if len(made) < len(pairs):
        twice, _ = collections.Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {shown(twice)} is there twice")
    return made
