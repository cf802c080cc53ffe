"""Files of a Hugging Face folder: safetensors and JSON.

The writer is ours: `safetensors` 0.8.0 ignores the strides of NumPy views, and needs all tensors in
memory at once. Source of the format: https://github.com/huggingface/safetensors, "Format".
"""

import contextlib
import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from flax_mha.interop.checked_config import several

_DTYPES: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64, "I32": np.int32, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def file_names(path: Path) -> dict[str, str]:
    """Return the file of each tensor of a folder, which may have none."""
    if (path / _FILE).is_file():
        return dict.fromkeys(read(path / _FILE), _FILE)
    if not (path / _INDEX).is_file():
        return {}
    index: dict[str, str] = read_json(path / _INDEX)["weight_map"]
    for name in index.values():
        if name != os.path.basename(name):
            raise ValueError(f"{path / _INDEX} must name files beside it, got {name!r:.100}")
    return index


def read_folder(path: Path) -> dict[str, np.ndarray]:
    """Return all tensors of a folder, from one file or several."""
    index = file_names(path)
    if not index:
        raise FileNotFoundError(
            f"{path} has neither {_FILE} nor {_INDEX}; save weights in other formats (pickles may "
            f"run code) as safetensors first"
        )
    parts = {file: read(path / file) for file in {*index.values()}}
    if missing := [name for name, file in index.items() if name not in parts[file]]:
        raise ValueError(f"{path / _INDEX} names tensors that its files lack: {several(missing)}")
    return {name: parts[file][name] for name, file in index.items()}


def weight_files(path: Path) -> set[str]:
    """Return the names of the files of a folder's weights and of their index."""
    return {_FILE, _INDEX, *file_names(path).values()}


def write_folder(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write a folder's weights as one file, and remove the others."""
    old = weight_files(path) - {_FILE}
    write(path / _FILE, tensors)
    for name in old:
        if name.endswith((".safetensors", _INDEX)):
            (path / name).unlink(missing_ok=True)


def read(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file, as views of the mapped file.

    `safetensors` only checks the file: its arrays are copies, and it has no bfloat16 in NumPy.

    Raises:
      ValueError: if the file is damaged.
    """
    from safetensors import SafetensorError, safe_open  # Nothing else needs the library.

    tensors = {}
    try:
        with safe_open(path, "np") as checked:
            entries = [(name, checked.get_slice(name)) for name in checked.offset_keys()]
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_SEQUENTIAL"):
            mapped.madvise(mmap.MADV_SEQUENTIAL)  # Read ahead in each thread's tensor.
        data = np.frombuffer(mapped, np.uint8)
        for name, entry in entries:
            dtype, shape = np.dtype(_DTYPES[entry.get_dtype()]), entry.get_shape()
            stop = start + math.prod(shape) * dtype.itemsize
            tensors[name] = data[start:stop].view(dtype).reshape(shape)
            start = stop
    except (SafetensorError, KeyError) as error:
        raise ValueError(
            f"{path} must be a complete safetensors file of dtypes that NumPy has, got: "
            f"{error}; fetch it again"
        ) from None
    return tensors


def write(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write the entries of `table.stored`, and replace a file only when complete."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (x, _) in tensors.items():
        end = offset + math.prod(x.shape) * x.dtype.itemsize
        entry = {"dtype": _NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [offset, end]}
        header[name], offset = entry, end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, make in tensors.values():
            file.write(make().reshape(-1).view(np.uint8))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces the old one, or a link, when it is complete."""
    temporary = path.with_name(path.name + ".part")
    with temporary.open("wb") as file:
        yield file
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged, its JSON can't be read: {error}") from None
