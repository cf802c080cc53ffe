"""Files with false headers, of small dtypes, in several parts, and behind links."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from flax_mha import interop
from flax_mha.interop import safetensors
from tests.interop.test_files import CONFIG, variables
from tests.interop.written import write

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
        ({"a": X, "b": Y | {"data_offsets": [4, 12]}}, 12, "invalid offset for tensor `b`"),
        ({"a": X, "b": Y}, 15, "file not fully covered"),
        ({"a": X | {"dtype": "F4", "data_offsets": [0, 1]}}, 1, "got: 'F4'"),
        (b'{"a":' * 10**5, 0, "invalid JSON in header"),
    ],
)  # fmt: skip
def test_false_headers_raise(header: Any, size: int, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words) as error:
        read(tmp_path, header, size)
    assert "\n" not in str(error.value)


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
    write(tmp_path / "model.safetensors", scaled)
    with pytest.raises(ValueError, match=r"surplus a\.weight_scale_inv"):
        interop.load(tmp_path)


def to_shards(path: Path) -> dict[str, str]:
    (path / "model.safetensors").rename(path / "a.safetensors")
    weights = dict.fromkeys(safetensors.read(path / "a.safetensors"), "a.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": weights}))
    return weights


def test_index_selects_file_of_repeated_tensor(linked: Path) -> None:
    to_shards(linked)
    other = {"model.norm.weight": np.full(16, 7, np.float32)}
    write(linked / "b.safetensors", {"b": np.zeros(1, np.float32)} | other)
    index = json.loads((linked / INDEX).read_text())
    index["weight_map"]["b"] = "b.safetensors"
    (linked / INDEX).write_text(json.dumps(index))
    tensors = safetensors.read_folder(linked)
    assert "b" in tensors
    assert not np.array_equal(tensors["model.norm.weight"], other["model.norm.weight"])


def test_missing_shards_raise(linked: Path) -> None:
    weights = to_shards(linked)
    (linked / INDEX).write_text(json.dumps({"weight_map": weights | {"more": "b.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"b\.safetensors"):
        interop.load(linked)


def test_links_are_followed(linked: Path) -> None:
    assert interop.load(linked)[0] == interop.family(CONFIG).module
