"""Folders with broken tokenizers: a one-line error, and no traceback."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.runs.failures import RunError
from tests.experiments.test_pretrained import QWEN, T5, folder_of, said


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("models")
    return {c["model_type"]: folder_of(c, path / c["model_type"]) for c in (QWEN, T5)}


@pytest.fixture
def changed(folders: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    def make(kind: str = "qwen3", tokenizer: bytes | None = None, **change: Any) -> Path:
        for path in folders[kind].iterdir():
            (tmp_path / path.name).symlink_to(path)
        config = json.loads((tmp_path / "config.json").read_text()) | change
        (tmp_path / "config.json").unlink()
        (tmp_path / "config.json").write_text(json.dumps(config))
        if tokenizer is not None:
            (tmp_path / "tokenizer.json").write_bytes(tokenizer)
        return tmp_path

    return make


@pytest.mark.parametrize("value", ["2", 2.5, True, {}, ["2"], [2.5], [[2]], -1, 10**20])
@pytest.mark.parametrize("name", ["eos_token_id", "decoder_start_token_id"])
def test_invalid_special_tokens_raise(name: str, value: Any, changed: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=f"the config's {name} must be a whole number in 0 … "):
        said(changed("t5", **{name: value}), "1 2", max_new_tokens=1)


def test_start_beyond_vocabulary_raises(changed: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="start must be in 0 … 49, got 50"):
        said(changed("t5", decoder_start_token_id=50), "1 2")


@pytest.mark.slow
@pytest.mark.parametrize("value", [None, [], 10**9, [10**9]])
def test_eos_outside_vocabulary_never_ends_the_text(
    value: Any, changed: Callable[..., Path]
) -> None:
    assert len(said(changed(eos_token_id=value), "1 2", max_new_tokens=3).split()) == 3


@pytest.mark.parametrize(
    ("prompt", "words"),
    [("1 99999999999", "ids of the prompt must be in 0 … 99, got 99999999999; take"),
     ("9" * 5000, "the prompt must be ids such as '12 7 401', got '999"), (" ", "must be ids")],
)  # fmt: skip
def test_invalid_prompts_raise(prompt: str, words: str, folders: dict[str, Path]) -> None:
    with pytest.raises(RunError, match=words) as error:
        said(folders["qwen3"], prompt)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    "change",
    [{"version": None}, {"model": {"type": "WordLevel", "vocab": {}, "unk_token": "?"}},
     {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated",
                        "invert": False}},
     None, b"", b"[]", b"\xff"],
    ids=["version", "unknown", "pattern", "null", "empty", "list", "bytes"],
)  # fmt: skip
def test_broken_tokenizer_files_raise_one_line(change: Any, changed: Callable[..., Path]) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra families")
    sound = json.loads(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 1}, "a")).to_str())
    text = change if isinstance(change, bytes) else json.dumps(change and sound | change).encode()
    with pytest.raises(RunError, match=r"must be a tokenizer.json, got: |can.t encode"):
        said(changed(tokenizer=text), "text")


@pytest.mark.sampled(0.13, slow=0.2)
def test_padding_of_tokenizer_is_ignored(changed: Callable[..., Path]) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra families")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 1}, "a"))
    tokenizer.enable_padding(length=10**9, pad_id=10**9)
    assert said(changed(tokenizer=tokenizer.to_str().encode()), "b", max_new_tokens=2) == ""
