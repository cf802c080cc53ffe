"""Files of a Hugging Face folder: safetensors and JSON.

The writer is ours: `safetensors` 0.8.0 ignores the strides of a NumPy view, so it writes other
numbers, and it needs all tensors in memory at once.

Source of the format: https://github.com/huggingface/safetensors, "Format".
"""

import collections
import contextlib
import json
import math
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from flax_mha.interop.checked_config import several, shown

_DTYPES: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu, "I64": np.int64, "I32": np.int32, "I16": np.int16,
    "I8": np.int8, "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
    "BOOL": np.bool_,
}  # fmt: skip
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# The limit of bytes of a JSON file, which safetensors has for its headers.
_MAX_BYTES = 100_000_000


def read_folder(path: Path) -> dict[str, np.ndarray]:
    """Return all tensors of a folder, from one file or several."""
    if (path / _FILE).is_file():
        return read(path / _FILE)
    if not (path / _INDEX).is_file():
        raise FileNotFoundError(
            f"{path} has neither {_FILE} nor {_INDEX}; save weights in other formats (pickles may "
            f"run code) as safetensors first"
        )
    index = _read_index(path)
    tensors: dict[str, np.ndarray] = {}
    for name in sorted({*index.values()}):
        try:
            part = read(path / name)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{path / _INDEX} names the file {shown(name)}, which is not there; fetch it too"
            ) from None
        # If two files have the same tensor, the index decides.
        tensors |= {key: x for key, x in part.items() if index.get(key, name) == name}
    if missing := sorted(index.keys() - tensors.keys()):
        raise ValueError(f"{path / _INDEX} names tensors that its files lack: {several(missing)}")
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    index = read_json(path / _INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(x, str) for x in index.values()):
        raise ValueError(f"{path / _INDEX} must have a weight_map from tensors to files")
    for name in sorted({*index.values()}):
        if name != os.path.basename(name) or not name.isprintable():
            raise ValueError(f"{path / _INDEX} must name files beside it, got {shown(name)}")
    return index


def names(path: Path) -> list[str]:
    """Return the names of a folder's tensors; none if it has no weights."""
    if (path / _FILE).is_file():
        return [*read(path / _FILE)]
    return [*_read_index(path)] if (path / _INDEX).is_file() else []


def weight_files(path: Path) -> set[str]:
    """Return the names of the files that hold a folder's weights, with their index."""
    if not (path / _INDEX).is_file():
        return {_FILE}
    return {_FILE, _INDEX, *_read_index(path).values()}


def write_folder(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write a folder's weights as one file, and remove the files of weights that it had."""
    old = weight_files(path) - {_FILE}
    write(path / _FILE, tensors)
    for name in old:
        if name.endswith((".safetensors", _INDEX)):
            (path / name).unlink(missing_ok=True)


def read(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file, as views of the mapped file.

    The library `safetensors` checks the file. It can't read the tensors, as its arrays are copies
    and it knows no bfloat16 or float8 in NumPy.

    Raises:
      ValueError: if the file is damaged, or no safetensors file.
    """
    from safetensors import SafetensorError, safe_open  # Nothing else needs the library.

    tensors = {}
    with _open(path) as file:
        try:
            with safe_open(path, "np") as checked:
                entries = [(name, checked.get_slice(name)) for name in checked.offset_keys()]
            start = 8 + int.from_bytes(file.read(8), "little")
            data = np.memmap(file, np.uint8, "r")
            for name, entry in entries:
                if not name.isprintable():
                    raise ValueError(f"a tensor named {name!r}")
                dtype, shape = np.dtype(_DTYPES[entry.get_dtype()]), entry.get_shape()
                stop = start + math.prod(shape) * dtype.itemsize
                tensors[name] = data[start:stop].view(dtype).reshape(shape)
                start = stop
        except (SafetensorError, KeyError, ValueError) as error:
            reason = str(error).removeprefix("Error while deserializing header: ")
            raise ValueError(
                f"{path} must be a complete safetensors file of dtypes that NumPy has, got: "
                f"{shown(reason)}; fetch it again"
            ) from None
    return tensors


def write(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write arrays, or the entries of `table.stored`, and replace a file only when complete."""
    entries = {n: x if isinstance(x, tuple) else (x, lambda x=x: x) for n, x in tensors.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (x, _) in entries.items():
        end = offset + math.prod(x.shape) * x.dtype.itemsize
        entry = {"dtype": _NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [offset, end]}
        header[name], offset = entry, end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, make in entries.values():
            file.write(np.ascontiguousarray(make()).reshape(-1).view(np.uint8))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces the old one, or a link, when it is complete."""
    temporary = path.with_name(path.name + ".part")
    with temporary.open("wb") as file:
        yield file
    temporary.replace(path)


def copy(source: Path, target: Path) -> None:
    """Copy the content of a file."""
    with _open(source) as file, replacing(target) as result:
        shutil.copyfileobj(file, result)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    return _parse(path, read_bytes(path))


def read_json_list(path: Path) -> list[Any]:
    """Return the array in a JSON file."""
    return _parse(path, read_bytes(path), list)


def read_bytes(path: Path) -> bytes:
    """Return the content of a small file, such as a config or a tokenizer."""
    try:
        with _open(path) as file:
            text = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} is not there; give the folder of a model, which has {path.name} and weights"
        ) from None
    if len(text) > _MAX_BYTES:
        raise ValueError(f"{path} must have at most {_MAX_BYTES} bytes, got more; fetch it again")
    return text


def _open(path: Path) -> BinaryIO:
    """Open a file or a link to one. Refuse pipes and devices, which may never end."""
    now = getattr(os, "O_NONBLOCK", 0)  # A pipe would block until someone writes.
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | now))  # noqa: SIM115
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path} must be a file that can be read, got: {reason}") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path} must be a regular file, got a pipe or a device; fetch it again")
    return file


def _parse(path: Path, text: bytes, kind: type = dict) -> Any:
    try:
        parsed = json.loads(text, object_pairs_hook=_make_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, its JSON can't be read: {error}") from None
    if not isinstance(parsed, kind):
        rule = "object" if kind is dict else "array"
        raise ValueError(f"{path} must hold a JSON {rule}, got {type(parsed).__name__}")
    return parsed


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse repeated keys, as other readers may use another value."""
    result = dict(pairs)
    if len(result) < len(pairs):
        repeated, _ = collections.Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {shown(repeated)} is there twice")
    return result
