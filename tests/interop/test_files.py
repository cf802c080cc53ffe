"""Folders of checkpoints without their libraries: shards, dtypes, and damaged files."""

import shutil
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from flax_mha import interop
from flax_mha.interop import safetensors
from tests.interop.written import write
from tests.support.arrays import random_variables

CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 1e4,
}  # fmt: skip


def variables(config: dict[str, Any] = CONFIG) -> Any:
    family = interop.family(config)
    return random_variables(family.module, *family.example)


def saved(config: dict[str, Any], path: Path) -> dict[str, np.ndarray]:
    """Save a model, and return its tensors."""
    interop.save(config, variables(config), path)
    return {name: np.array(x) for name, x in safetensors.read_folder(path).items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    interop.save(CONFIG, variables(), tmp_path)
    return tmp_path


@pytest.mark.parametrize("sharded", [False, True])
def test_loaded_parameters_do_not_change_with_the_file(folder: Path, sharded: bool) -> None:
    """In JAX 0.10.2 and 0.12.0.1, `device_put` shares aligned memory of NumPy, also of files."""
    (path,) = folder.glob("*.safetensors")
    raw = path.read_bytes()
    (header,) = struct.unpack("<Q", raw[:8])
    pad = -(8 + header) % 64  # Aligns tensors.
    size, end = struct.pack("<Q", header + pad), 8 + header
    path.write_bytes(size + raw[8:end] + b" " * pad + raw[end:])
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    places = {"shardings": NamedSharding(mesh, PartitionSpec())} if sharded else {"as_jax": True}
    _, loaded = interop.load(folder, **places)
    before = jax.tree.map(np.array, loaded)
    with path.open("r+b") as file:
        file.write(bytes(len(raw) + pad))
    jax.tree.map(np.testing.assert_array_equal, loaded, before)


def test_arrays_of_jax_on_the_default_device(folder: Path) -> None:
    _, found = interop.load(folder, as_jax=True, dtype="bfloat16")
    (device,) = jnp.zeros(()).devices()
    for x in jax.tree.leaves(found):
        assert isinstance(x, jax.Array)
        assert (x.devices(), x.dtype) == ({device}, jnp.bfloat16)
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves(interop.load(folder)[1]))


def test_each_device_gets_its_part(folder: Path) -> None:
    mesh = jax.make_mesh((8,), ("model",))
    whole = NamedSharding(mesh, PartitionSpec())

    def sharding(x: jax.Array) -> NamedSharding:
        for n, size in enumerate(x.shape):
            if size % 8 == 0:
                return NamedSharding(mesh, PartitionSpec(*(None,) * n, "model"))
        return whole

    wanted = variables()
    _, found = interop.load(folder, shardings=jax.tree.map(sharding, wanted), dtype=jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    kernel = found["params"]["decoder"]["layers_0"]["mlp"]["up"]["kernel"]
    assert kernel.addressable_shards[3].data.shape == (2, 24)
    _, found = interop.load(folder, shardings=whole)
    assert all(x.sharding == whole for x in jax.tree.leaves(found))


def test_one_error_lists_all_wrong_tensors(tmp_path: Path) -> None:
    tensors = saved(CONFIG, tmp_path)
    tensors["model.other.weight"] = tensors.pop("model.norm.weight")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.norm2"] = np.zeros((3, 3), "f")
    write(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ValueError, match="do not fit the model") as error:
        interop.load(tmp_path)
    for words in (
        "missing model.norm.weight", "surplus model.other.weight", "surplus model.norm2",
        "model.layers.0.mlp.up_proj.weight must be [24, 16], is [3, 3]",
    ):  # fmt: skip
        assert words in str(error.value)


def test_damaged_files_raise(folder: Path) -> None:
    """Cut anywhere, or with a false header: a clear error, and nothing is loaded."""
    whole = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    cuts = [whole[:n] for n in (0, 5, 8, 40, start, start + 1, len(whole) - 1)]
    lies = [
        b"\xff" * 8 + whole[8:], whole[:8] + b"[]" + b" " * (start - 10) + whole[start:],
        whole.replace(b'"F32"', b'"F99"', 1), whole.replace(b"[24, 16]", b"[24, -1]", 1),
        whole.replace(b'"data_offsets": [0', b'"data_offsets": [9', 1),
        whole.replace(b'"shape"', b'"sharp"', 1), whole.replace(b'{"', b'{\xff', 1),
    ]  # fmt: skip
    for damaged in cuts + lies:
        assert damaged != whole
        (folder / "model.safetensors").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"fetch it again|damaged|can be read|JSON object"):
            interop.load(folder)


def test_folders_without_weights_raise(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        interop.load(folder)
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError):
        interop.load(folder)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_hidden_layers": 3}, "layers_2"),
        ({"vocab_size": 25}, r"embedding/table/embedding \(\[24, 16\] in place of \[25, 16\]\)"),
        # The tensors have the same shapes: other heads would be loaded, in silence.
        ({"num_attention_heads": 2, "head_dim": 16, "num_key_value_heads": 1}, r"query/kernel \("),
        ({"num_attention_heads": 8, "head_dim": 4}, r"key/kernel \("),
    ],
)
def test_variables_of_other_sizes_are_not_saved(
    change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"must be the model's, got a difference in .*{told}"):
        interop.save(CONFIG | change, variables(), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"use_sliding_window": False}, "no no no no no no"),
        ({"use_sliding_window": True, "max_window_layers": 4}, "no no no no 4 4"),
        ({"model_type": "mistral"}, "4 4 4 4 4 4"),
        ({"model_type": "gemma2"}, "4 no 4 no 4 no"),
        ({"model_type": "gemma3_text"}, "4 4 4 4 4 no"),
    ],
    ids=str,
)
def test_sliding_window_reaches_the_right_layers(change: dict[str, Any], windows: str) -> None:
    """In configs without `layer_types`, like most folders."""
    config = CONFIG | {"num_hidden_layers": 6, "sliding_window": 4} | change
    blocks = interop.family(config).module.decoder.blocks
    masks = [blocks[i % len(blocks)].attention.mask for i in range(6)]
    assert " ".join("no" if x is None else str(x.left + 1) for x in masks) == windows


def test_old_gemma_3_configs_give_two_rotary_bases() -> None:
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4,
           "rope_scaling": {"rope_type": "linear", "factor": 8.0}}  # fmt: skip
    change = {"model_type": "gemma3_text", "sliding_window": 4, "num_hidden_layers": 6}
    local, *_, whole = interop.family(CONFIG | change | old).module.decoder.blocks
    assert (local.attention.rotary.base, local.attention.rotary.scaling) == (1e4, None)
    assert (whole.attention.rotary.base, whole.attention.rotary.scaling.factor) == (1e6, 8.0)
