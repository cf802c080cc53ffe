"""The files beside the weights of a Hugging Face folder: saved and converted models keep them."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.convert import convert
from flax_mha import interop
from flax_mha.interop import safetensors
from tests.interop.odd_configs import CONFIGS
from tests.interop.test_files import CONFIG, saved, variables
from tests.interop.test_odd_files import INDEX, to_shards
from tests.interop.written import write

# As of a sentence model: 13 files, whose names those of all-MiniLM-L6-v2 include.
BESIDE = {
    ".gitattributes": "*.safetensors filter=lfs", "1_Pooling/config.json": "{}", "LICENSE": "free",
    "2_Dense/config.json": "{}", "2_Dense/pytorch_model.bin": "\x80", "README.md": "# A model",
    "config_sentence_transformers.json": "{}", "tokenizer.json": '{"version": "1.0"}',
    "modules.json": json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]),
    "generation_config.json": '{"eos_token_id": [3, 5]}', "vocab.txt": "a\nb", "merges.txt": "a b",
    "spiece.model": "\n\x0e", "chat_template.jinja": "{{ messages }}",
}  # fmt: skip
ELSEWHERE = {"pytorch_model.bin": "\x80", "onnx/model.onnx": "\x08", "tf_model.h5": "\x89"}


def fill(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode("latin1"))


def texts_of(folder: Path) -> dict[str, str]:
    names = (str(x.relative_to(folder)) for x in folder.rglob("*") if x.is_file())
    return {name: (folder / name).read_text("latin1") for name in names if name not in WRITTEN}


WRITTEN = {"config.json", "model.safetensors"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    interop.save(CONFIG, variables(), tmp_path / "published")
    fill(tmp_path / "published", BESIDE)
    return tmp_path / "published"


def test_saved_folder_has_the_files_beside_the_weights(folder: Path, tmp_path: Path) -> None:
    _, found = interop.load(folder)
    doubled = jax.tree.map(lambda x: 2 * x, found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        interop.save(str(folder), doubled, tmp_path / "mine")
        interop.save(folder, doubled, folder / "mine")
    assert texts_of(tmp_path / "mine") == texts_of(folder / "mine") == BESIDE
    jax.tree.map(np.testing.assert_array_equal, interop.load(tmp_path / "mine")[1], doubled)
    assert interop.generation(tmp_path / "mine") == {"eos": (3, 5)}


def test_converted_folder_has_the_files_beside_the_weights(folder: Path, tmp_path: Path) -> None:
    """In both directions. The weights of the other form stay where they are."""
    fill(folder, ELSEWHERE)
    left = "left behind: onnx/; pytorch_model.bin; tf_model.h5"
    assert convert(folder, tmp_path / "orbax").endswith(f"Orbax; {left}")
    assert convert(tmp_path / "orbax", tmp_path / "back").endswith("safetensors")
    assert texts_of(tmp_path / "back") == BESIDE
    assert {x.name for x in (tmp_path / "orbax").iterdir()} == {
        x.name for x in (tmp_path / "back").iterdir()
    } - {"model.safetensors"} | {"variables"}


def test_files_left_behind_are_one_line(folder: Path, tmp_path: Path) -> None:
    fill(folder, ELSEWHERE)
    (folder / "lost.json").symlink_to(tmp_path / "nowhere")
    with pytest.warns(UserWarning, match="behind: lost.json; onnx/; pytorch_model.bin; tf_"):
        interop.save(folder, variables(), tmp_path / "mine")
    assert texts_of(tmp_path / "mine") == BESIDE


@pytest.mark.sampled(0.08)
def test_weights_of_the_same_folder_are_replaced(folder: Path) -> None:
    """Also while the variables are views of the old files, and several of them."""
    _, found = interop.load(folder)
    interop.save(folder, found)
    jax.tree.map(np.testing.assert_array_equal, interop.load(folder)[1], variables())
    to_shards(folder)
    model, found = interop.load(folder)
    interop.save(folder, found)
    assert not {INDEX, "a.safetensors"} & {x.name for x in folder.iterdir()}
    jax.tree.map(np.testing.assert_array_equal, interop.load(folder)[1], variables())
    assert texts_of(folder) == BESIDE
    assert model == interop.load(folder)[0]


@pytest.mark.parametrize("prefix", ["", "model."])
def test_tensors_keep_their_names(prefix: str, tmp_path: Path) -> None:
    tensors = saved(CONFIGS["dinov3"], tmp_path)
    assert "layer.0.norm1.weight" in tensors
    mask = {"embeddings.mask_token": np.zeros((1, 1, 16), np.float32)}
    write(tmp_path / "model.safetensors", mask | {prefix + x: tensors[x] for x in tensors})
    left = "has no place for them: embeddings.mask_token$"
    with pytest.warns(UserWarning, match=left):
        found = interop.load(tmp_path)[1]
    with pytest.warns(UserWarning, match=left):
        interop.save(tmp_path, found)
    assert {*safetensors.file_names(tmp_path)} == {prefix + x for x in tensors}


def test_links_into_a_cache_are_copied_and_kept(folder: Path, tmp_path: Path) -> None:
    """Hugging Face's cache has links to files, which other folders share."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in folder.iterdir():
        (linked / path.name).symlink_to(path)
    (linked / "1_Pooling").unlink()
    (linked / "1_Pooling").mkdir()
    (linked / "1_Pooling" / "config.json").symlink_to(folder / "1_Pooling" / "config.json")
    before = {name: (folder / name).read_bytes() for name in WRITTEN}
    _, found = interop.load(linked)
    halved = jax.tree.map(lambda x: (x / 2).astype("bfloat16"), found)
    interop.save(linked, halved, tmp_path / "mine")
    assert not any(x.is_symlink() for x in (tmp_path / "mine").rglob("*"))
    assert texts_of(tmp_path / "mine") == BESIDE
    interop.save(linked, halved)
    assert {name: (folder / name).read_bytes() for name in WRITTEN} == before
    assert json.loads((linked / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("path", ["./published/", "~/published", Path("published")])
def test_paths_as_people_give_them(
    path: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    interop.save(path, interop.load(path)[1], "~/mine")
    assert texts_of(tmp_path / "mine") == BESIDE
    assert interop.generation(path) == {"eos": (3, 5)}


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "published/config.json"])
def test_other_paths_raise(name: str, folder: Path) -> None:
    path = folder.parent / name
    for call in (
        lambda: interop.load(path), lambda: interop.generation(path),
        lambda: interop.save(path, variables(), "mine"),
    ):  # fmt: skip
        with pytest.raises(FileNotFoundError, match=f"{name} must be the folder of a model"):
            call()


@pytest.mark.parametrize("name", ["..", "../elsewhere", "/tmp", "."])
def test_modules_elsewhere_are_not_copied(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / "modules.json").write_text(json.dumps([{"path": name}]))
    with pytest.warns(UserWarning, match="left behind: 1_Pooling/; 2_Dense/;"):
        interop.save(folder, variables(), tmp_path / "mine")
    assert not [x for x in (tmp_path / "mine").iterdir() if x.is_dir()]


def test_pipes_raise(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(folder / "2_Dense" / "pipe")
    with pytest.raises(OSError, match="is a named pipe"):
        interop.save(folder, variables(), tmp_path / "mine")


def test_only_files_of_weights_are_removed(folder: Path) -> None:
    """An index may name any file."""
    weights = to_shards(folder)
    (folder / "config.json").rename(folder / "kept.safetensors.txt")
    index = {"weight_map": weights | {"more": "LICENSE"}}
    (folder / INDEX).write_text(json.dumps(index))
    x = np.zeros(1, np.float32)
    safetensors.write_folder(folder, {"x": (x, lambda: x)})
    assert (folder / "LICENSE").read_text() == "free"
    assert not (folder / INDEX).exists()
