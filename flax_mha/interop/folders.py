"""Hugging Face folders, and their files besides the weights."""

import os
import re
from pathlib import Path
from typing import TypeAlias

from flax_mha.interop import safetensors
from flax_mha.interop.checked_config import shown

AnyPath: TypeAlias = str | os.PathLike[str]

CONFIG, GENERATION = "config.json", "generation_config.json"
_MODULES = "modules.json"
# Tokenizers, settings, templates of chats, model cards; without a suffix, licenses.
_SUFFIXES = {
    "", ".bpe", ".jinja", ".json", ".md", ".model", ".spm", ".tiktoken", ".txt", ".vocab",
}  # fmt: skip


def open_folder(path: AnyPath) -> Path:
    """Return a path as a folder. Refuse a file, or the hub's cache of several versions."""
    folder = Path(path).expanduser()
    if (versions := folder / "snapshots").is_dir() and not (folder / CONFIG).exists():
        found = sorted(x.name for x in versions.iterdir())
        raise ValueError(
            f"{folder} must be the folder of one model, got the cache of several versions; give "
            f"{versions / (found or ['…'])[0]}"
        )
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{folder} must be a folder, got a file; give {folder.parent}")
    rule = f"{folder} is not there; give the folder of a model, which has {CONFIG} and weights"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        rule += f", or fetch it: huggingface_hub.snapshot_download({str(path)!r})"
    raise FileNotFoundError(rule)


def carry(source: Path, target: Path, ignored: tuple[str, ...] = ()) -> list[str]:
    """Copy a model's files to another folder, without its config, its weights and `ignored`.

    These are tokenizers, `generation_config.json`, model cards, licenses, and a sentence model's
    `modules.json` with its folders. The names of other files and folders are returned.

    Raises:
      ValueError: if a file can't be read, or `modules.json` names a folder elsewhere.
    """
    place = target.resolve()
    if source.resolve() == place:
        return []
    weights = {*safetensors.weight_files(source), *ignored}
    modules, left = _modules(source), []
    for path in sorted(source.iterdir()):
        if path.name in modules and path.is_dir():
            (target / path.name).mkdir(exist_ok=True)
            for part in path.iterdir():
                safetensors.copy(part, target / path.name / part.name)
        elif path.is_file() and path.suffix in _SUFFIXES:
            if path.name not in {CONFIG, *weights}:
                safetensors.copy(path, target / path.name)
        elif path.name[0] != "." and path.name not in weights and path.resolve() != place:
            left.append(f"{path.name}/" if path.is_dir() else path.name)
    return left


def _modules(folder: Path) -> set[str]:
    """Return the names of the folders of a sentence model's modules."""
    if not (folder / _MODULES).is_file():
        return set()
    parts = safetensors.read_json_list(folder / _MODULES)
    names = {str(part.get("path", "")) if isinstance(part, dict) else "" for part in parts}
    for name in names:
        if name != os.path.basename(name) or name in (".", "..") or not name.isprintable():
            raise ValueError(
                f"{folder / _MODULES} must name folders beside it, got {shown(name)}; fetch it "
                f"again"
            )
    return names
