"""Tensors in safetensors files, memory-mapped: what is not looked at is not read.

The library `safetensors` gives slices along the axes of a tensor as it lies; here views are needed,
which can be transposed and cut before anything is read.

Source of the format: https://github.com/huggingface/safetensors, "Format".
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_DTYPES: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
    "BOOL": np.bool_,
}  # fmt: skip
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# A header larger than this is none: the format allows no more.
_HEADER = 100 * 2**20


def read_folder(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, of one file or of an index of several."""
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
    found: dict[str, np.ndarray] = {}
    for name in sorted({*index.values()}):
        if name != os.path.basename(name):
            raise ValueError(f"{path / _INDEX} must name files beside it, got {name!r}")
        found |= read(path / name)
    lacking = sorted(index.keys() - found.keys())
    if lacking:
        raise ValueError(f"{path / _INDEX} names tensors that its files lack: {lacking}")
    return found


def read(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file, as views of it.

    Raises:
      ValueError: if it is no such file, or not whole.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER):
            raise ValueError(f"{path} is no whole safetensors file of {size} bytes; fetch it again")
        header = _parsed(path, file.read(length))
    start, found = 8 + length, {}
    data = np.memmap(path, np.uint8, "r") if size > start else np.zeros(start, np.uint8)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(map(int, entry["shape"]))
            begin, end = (int(x) + start for x in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: tensor {name} has no dtype, shape and data_offsets that can be read, got "
                f"{str(entry)[:200]}"
            ) from error
        wanted = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or not start <= begin <= end <= size or end - begin != wanted:
            raise ValueError(
                f"{path}: tensor {name}, {dtype}{list(shape)}, must lie in {wanted} bytes of the "
                f"file's {size}, its offsets are {begin} … {end}; fetch it again"
            )
        found[name] = data[begin:end].view(dtype).reshape(shape)
    return found


def write(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a file of those tensors, aside and then renamed."""
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
            file.write(np.ascontiguousarray(x).tobytes())
    aside.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not there; give the folder of a model, which has {path.name} and weights"
        )
    return _parsed(path, path.read_bytes())


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, its JSON can't be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return found
