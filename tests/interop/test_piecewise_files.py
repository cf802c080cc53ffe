"""Files read and written piece by piece: dtypes, memory, order."""

import itertools
import json
import tracemalloc
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from flax_mha import interop
from flax_mha.interop import device_put, safetensors
from tests.interop.test_files import CONFIG, variables
from tests.interop.written import write


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gemma_keeps_its_dtype(dtype: str, tmp_path: Path) -> None:
    """Scales too: the file stores their difference from 1, rounded once in each direction."""
    config = CONFIG | {"model_type": "gemma3_text", "sliding_window": 4}
    kept = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    given = jax.tree.map(lambda x: np.asarray(x, kept), variables(config))
    interop.save(config, given, tmp_path)
    tensors = safetensors.read(tmp_path / "model.safetensors")
    assert {x.dtype.name for x in tensors.values()} == {dtype}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == dtype
    _, found = interop.load(tmp_path)
    assert {x.dtype.name for x in jax.tree.leaves(found)} == {dtype}
    wanted = given["params"]["decoder"]["norm"]["scale"].astype(np.float64)
    got = found["params"]["decoder"]["norm"]["scale"].astype(np.float64)
    np.testing.assert_allclose(got, wanted, atol=2 * float(ml_dtypes.finfo(kept).eps))


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


def test_transposed_reads_are_exact(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        x = rng.normal(size=(40, 60, 30)).astype(dtype)
        write(tmp_path / "model.safetensors", {"x": x})
        view = safetensors.read(tmp_path / "model.safetensors")["x"]
        for axes in itertools.permutations(range(3)):
            got = device_put.place(None, view.transpose(axes), None)
            np.testing.assert_array_equal(got, x.transpose(axes))
            cast = device_put.place(np.dtype(np.float32), view.transpose(axes)[3:], None)
            np.testing.assert_array_equal(cast, x.transpose(axes)[3:].astype(np.float32))
            assert cast.flags.c_contiguous
            assert cast.ctypes.data % 64 == 0


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
