"""Hugging Face folders, and their files besides the weights."""

import os
import shutil
from pathlib import Path
from typing import TypeAlias

from flax_mha.interop import safetensors

AnyPath: TypeAlias = str | os.PathLike[str]

CONFIG, GENERATION = "config.json", "generation_config.json"
_MODULES = "modules.json"
# Without a suffix: licenses.
_SUFFIXES = {
    "", ".bpe", ".jinja", ".json", ".md", ".model", ".spm", ".tiktoken", ".txt", ".vocab",
}  # fmt: skip


def open_folder(path: AnyPath) -> Path:
    """Return a path as a folder."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} must be the folder of a model, which has {CONFIG} and weights; fetch a "
            f"model of the hub with huggingface_hub.snapshot_download"
        )
    return folder


def carry(source: Path, target: Path, ignored: tuple[str, ...] = ()) -> list[str]:
    """Copy a model's files to another folder, without its config, its weights and `ignored`.

    These are tokenizers, settings, model cards, licenses, and a sentence model's modules. The names
    of others are returned.
    """
    place, copies, left = target.resolve(), dict[Path, Path](), list[str]()
    if source.resolve() == place:
        return []
    kept = {CONFIG, *safetensors.weight_files(source), *ignored}
    is_split = (source / _MODULES).is_file()
    parts = safetensors.read_json(source / _MODULES) if is_split else []
    modules = [part["path"] for part in parts]
    for path in sorted(source.iterdir()):
        new = target / path.name
        if path.name in modules and path.is_dir():
            copies |= {part: new / part.name for part in path.iterdir()}
        elif path.is_file() and path.suffix in _SUFFIXES:
            copies |= {} if path.name in kept else {path: new}
        elif path.name[0] != "." and path.name not in kept and path.resolve() != place:
            left.append(f"{path.name}/" if path.is_dir() else path.name)
    for path, new in copies.items():
        new.parent.mkdir(exist_ok=True)
        new.unlink(missing_ok=True)  # It may be a link.
        shutil.copyfile(path, new)
    return left
