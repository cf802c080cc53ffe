"""Untrusted folders: files with false headers, and files without an end."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.convert import convert
from experiments.trained import pretrained
from flax_mha import interop
from flax_mha.interop import safetensors
from tests.interop.test_files import CONFIG, variables

INDEX = "model.safetensors.index.json"
X = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
Y = X | {"data_offsets": [8, 16]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound")
    interop.save(CONFIG, variables(), path)
    return path


@pytest.fixture
def linked(folder: Path, tmp_path: Path) -> Path:
    """Return a folder of links to files elsewhere, like Hugging Face's cache."""
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def read(path: Path, header: Any, size: int = 16) -> dict[str, np.ndarray]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(size)))
    return safetensors.read(path)


def test_tensors_in_any_order_and_empty_ones_are_read(tmp_path: Path) -> None:
    empty = {"dtype": "F32", "shape": [0, 3], "data_offsets": [8, 8]}
    header = {"__metadata__": None, "b": Y, "c": empty, "a": X}  # MLX writes null.
    tensors = read(tmp_path, header)
    assert {name: x.tobytes()[:1] for name, x in tensors.items()} == {
        "a": b"\x00", "b": b"\x08", "c": b""
    }  # fmt: skip
    assert read(tmp_path, {}, 0) == {}


@pytest.mark.parametrize(
    ("header", "size", "words"),
    [
        ({"a": X, "b": X}, 8, "invalid offset for tensor `[ab]`"),
        ({"a": X, "b": Y | {"data_offsets": [4, 12]}}, 12, "invalid offset for tensor `b`"),
        ({"a": X, "b": Y | {"data_offsets": [12, 20]}}, 20, "invalid offset for tensor `b`"),
        ({"b": Y}, 16, "invalid offset for tensor `b`"),
        ({"a": X}, 16, "file not fully covered"),
        ({}, 1, "file not fully covered"),
        ({"a": X, "b": Y}, 15, "file not fully covered"),
        ({"a": X | {"shape": [3]}, "b": Y}, 16, "invalid shape, data type, or offset"),
        (b'{"a":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}', 8, "duplicate"),
        ({"a": X, "more": {}}, 8, "missing field `dtype`"),
        ({"a": X, "more": [1]}, 8, "invalid JSON in header"),
        ({"a": X, "__metadata__": 1}, 8, "invalid JSON in header"),
        ({"a": X, "__metadata__": {"a": 1}}, 8, "invalid JSON in header"),
        ({"a": X | {"shape": ["2"]}}, 8, "invalid JSON in header"),
        ({"a": X | {"shape": [2.0]}}, 8, "invalid JSON in header"),
        ({"a": X | {"shape": [2, True]}}, 8, "invalid JSON in header"),
        ({"a": X | {"shape": [1] * 99 + [2]}}, 8, "maximum supported dimension"),
        ({"a": X | {"shape": [10**30, 0], "data_offsets": [0, 0]}}, 0, "expected usize"),
        ({"a": X | {"shape": [2**47, 2**47, 0], "data_offsets": [0, 0]}}, 0, "overflow"),
        ({"a": X | {"dtype": ["F32"]}}, 8, "invalid JSON in header"),
        ({"a": X | {"data_offsets": [0, 8, 9]}}, 8, "invalid JSON in header"),
        ({"a": X | {"data_offsets": [8, 0]}}, 8, "invalid offset for tensor `a`"),
        (b'{"a":' + b"9" * 5000 + b"}", 0, "invalid JSON in header"),
        (b'{"a":' * 10**5, 0, "invalid JSON in header"),
    ],
)  # fmt: skip
def test_false_headers_raise(header: Any, size: int, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words) as error:
        read(tmp_path, header, size)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_tensors_are_read_and_written(dtype: str, tmp_path: Path) -> None:
    tensors = jax.tree.map(lambda x: x.astype(dtype), variables())
    interop.save(CONFIG, tensors, tmp_path)
    for wide in (None, "float32"):
        found = interop.load(tmp_path, dtype=wide)[1]
        assert {x.dtype.name for x in jax.tree.leaves(found)} == {wide or dtype}
        same = lambda x, y: np.testing.assert_array_equal(x, y.astype(x.dtype))  # noqa: E731
        jax.tree.map(same, found, tensors)
    scaled = safetensors.read(tmp_path / "model.safetensors") | {"a.weight_scale_inv": np.ones(1)}
    safetensors.write(tmp_path / "model.safetensors", scaled)
    with pytest.raises(ValueError, match=r"quantized, got the scales a\.weight_scale_inv; load"):
        interop.load(tmp_path)


def to_shards(path: Path) -> dict[str, str]:
    (path / "model.safetensors").rename(path / "a.safetensors")
    weights = dict.fromkeys(safetensors.read(path / "a.safetensors"), "a.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": weights}))
    return weights


def test_index_selects_file_of_repeated_tensor(linked: Path) -> None:
    to_shards(linked)
    other = {"model.norm.weight": np.full(16, 7, np.float32)}
    safetensors.write(linked / "b.safetensors", {"b": np.zeros(1, np.float32)} | other)
    index = json.loads((linked / INDEX).read_text())
    index["weight_map"]["b"] = "b.safetensors"
    (linked / INDEX).write_text(json.dumps(index))
    tensors = safetensors.read_folder(linked)
    assert "b" in tensors
    assert not np.array_equal(tensors["model.norm.weight"], other["model.norm.weight"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("b.safetensors", f"{INDEX} names the file 'b.safetensors', which is not there; fetch it"),
        ("..", "must be a file that can be read, got: Is a directory"),
        ("x" * 300, "must be a file that can be read, got: File name too long"),
        ("a\0", r"must name files beside it, got 'a\\x00'"), ("", "got: Is a directory"),
    ],
    ids=["missing", "folder", "long", "zero", "empty"],
)  # fmt: skip
def test_missing_shards_raise(name: str, words: str, linked: Path) -> None:
    weights = to_shards(linked)
    (linked / INDEX).write_text(json.dumps({"weight_map": weights | {"more": name}}))
    with pytest.raises((ValueError, FileNotFoundError), match=words) as error:
        interop.load(linked)
    assert "\n" not in str(error.value)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10**10)


def loop(path: Path) -> None:
    path.symlink_to(path)


CASES = [
    ("config.json", pipe, "must be a regular file"),
    ("config.json", endless, "must be a regular file"),
    ("config.json", huge, "must have at most 100000000 bytes"),
    ("config.json", loop, "can be read, got: Too many levels"),
    ("config.json", Path.mkdir, "can be read, got: Is a directory"),
    ("a.safetensors", pipe, "must be a regular file"),
    ("a.safetensors", endless, "must be a regular file"),
    ("a.safetensors", huge, "must be a complete safetensors file"),
    (INDEX, huge, "must have at most 100000000 bytes"),
]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes and devices")
@pytest.mark.parametrize(("name", "make", "words"), CASES)
def test_special_or_huge_files_raise_quickly(
    name: str, make: Callable[[Path], None], words: str, linked: Path
) -> None:
    to_shards(linked)
    (linked / name).unlink()
    make(linked / name)
    start = time.monotonic()
    for use in (
        interop.load,
        lambda path: pretrained.respond(path, "1 2", print),
        lambda path: convert(path, path / "converted"),
    ):
        with pytest.raises(ValueError, match=words) as error:
            use(linked)
        assert "\n" not in str(error.value)
    assert time.monotonic() - start < 60


def test_links_are_followed(linked: Path) -> None:
    assert interop.load(linked)[0] == interop.family(CONFIG).module
