"""Files with false headers, small dtypes or several parts, read and written piece by piece."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from flax_mha import interop
from flax_mha.interop import device_put, safetensors
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


def test_several_files_and_dtypes(linked: Path) -> None:
    """The index says which file a repeated tensor is read from; all are cast to another dtype."""
    weights = to_shards(linked)
    norm = np.full(16, 7, "bfloat16")
    write(linked / "b.safetensors", {"model.norm.weight": norm, "lm_head.weight": norm})
    named = weights | {"model.norm.weight": "b.safetensors"}
    (linked / INDEX).write_text(json.dumps({"weight_map": named}))
    module, found = interop.load(linked)
    assert module == interop.family(CONFIG).module
    scale = found["params"]["decoder"]["norm"]["scale"]
    np.testing.assert_array_equal(scale, norm)
    assert {x.dtype.name for x in jax.tree.leaves(found)} == {"bfloat16", "float32"}
    _, found = interop.load(linked, dtype="float16")
    assert {x.dtype.name for x in jax.tree.leaves(found)} == {"float16"}


@pytest.mark.parametrize(
    ("file", "error", "words"),
    [
        ("b.safetensors", FileNotFoundError, r"b\.safetensors"),
        ("a.safetensors", ValueError, "names tensors that its files lack"),
        ("../a.safetensors", ValueError, "must name files beside it"),
    ],
)
def test_false_indices_raise(file: str, error: Any, words: str, linked: Path) -> None:
    weights = to_shards(linked) | {"more": file}
    (linked / INDEX).write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(error, match=words):
        interop.load(linked)


def test_gemma_keeps_bfloat16(tmp_path: Path) -> None:
    """Scales too: the file stores their difference from 1, rounded once in each direction."""
    config = CONFIG | {"model_type": "gemma3_text", "sliding_window": 4}
    given = jax.tree.map(lambda x: x.astype("bfloat16"), variables(config))
    interop.save(config, given, tmp_path)
    tensors = safetensors.read(tmp_path / "model.safetensors")
    assert {x.dtype.name for x in tensors.values()} == {"bfloat16"}
    _, found = interop.load(tmp_path)
    assert {x.dtype.name for x in jax.tree.leaves(found)} == {"bfloat16"}
    wanted = given["params"]["decoder"]["norm"]["scale"].astype(np.float64)
    got = found["params"]["decoder"]["norm"]["scale"].astype(np.float64)
    np.testing.assert_allclose(got, wanted, atol=2 * float(ml_dtypes.finfo("bfloat16").eps))


def test_saved_config_names_the_dtype_of_the_weights(tmp_path: Path) -> None:
    half = jax.tree.map(lambda x: np.asarray(x, np.float16), variables())
    old = CONFIG | {"torch_dtype": "bfloat16"}
    for given, name in ((half, "float16"), (variables(), "float32")):
        interop.save(old, given, tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        assert saved == old | {"dtype": name, "torch_dtype": name}


def test_saving_needs_memory_for_one_tensor(tmp_path: Path) -> None:
    sizes = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    given = variables(CONFIG | sizes)
    largest = max(x.nbytes for x in jax.tree.leaves(given))
    tracemalloc.start()
    interop.save(CONFIG | sizes, given, tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(x.nbytes for x in jax.tree.leaves(given)) > 8 * largest
    assert peak < 1.5 * largest + 2**19
    jax.tree.map(np.testing.assert_array_equal, interop.load(tmp_path)[1], given)


def test_views_of_several_tensors_are_concatenated(tmp_path: Path) -> None:
    """Sharded by any axis over devices."""
    parts = [np.arange(24.0, dtype=np.float32).reshape(n, -1, 4) for n in (1, 2, 1)]
    parts = [x[:, :3] for x in parts]
    write(tmp_path / "model.safetensors", {str(i): x for i, x in enumerate(parts)})
    views = [*safetensors.read(tmp_path / "model.safetensors").values()]
    mesh = jax.make_mesh((4,), ("all",), devices=jax.devices()[:4])
    for spec in (None, ("all",), (None, None, "all")):
        sharding = None if spec is None else NamedSharding(mesh, PartitionSpec(*spec))
        got = device_put.place(np.dtype(np.float16), views, sharding)
        np.testing.assert_array_equal(got, np.concatenate(parts).astype(np.float16))
