"""Folders with broken tokenizers: a one-line error, and no traceback."""

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments import pretrained
from experiments.runs.failures import RunError
from tests.experiments.test_pretrained import QWEN, T5, folder_of, said

ROOT = Path(__file__).parent.parent.parent


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


class Fake:
    """A stand-in for the package, which may not be installed."""

    ids: Any = ()

    @classmethod
    def from_buffer(cls, _: bytes) -> "Fake":
        return cls()

    def no_padding(self) -> None:
        pass

    def encode(self, _: str) -> Any:
        return types.SimpleNamespace(ids=type(self).ids)

    def decode(self, ids: list[int]) -> str:
        return str(ids)


@pytest.mark.parametrize(
    ("fails", "ids", "words"),
    [("from_buffer", [1], "must be a tokenizer that the package"), ("", [], "have at least one t"),
     ("encode", [1], "must be a tokenizer that"), ("decode", [1], "must be a tokenizer that"),
     ("", [1, 100], "ids of the prompt must be in 0 … 99, got 100; take weights and tokenizer.js")],
)  # fmt: skip
def test_failing_tokenizer_raises_one_line(
    fails: str, ids: list[int], words: str, changed: Callable[..., Path], monkeypatch: Any
) -> None:
    class Failing(Fake):
        pass

    def fail(*_: Any) -> Any:
        raise Exception("bad\n" * 99)  # Like the package.

    Failing.ids = ids
    if fails:
        setattr(Failing, fails, fail)
    package = types.SimpleNamespace(Tokenizer=Failing)
    monkeypatch.setattr(pretrained.importlib, "import_module", lambda _: package)
    with pytest.raises(RunError, match=words) as error:
        said(changed(tokenizer=b"{}"), "text")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


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
    with pytest.raises(RunError, match="must be a tokenizer that the package tokenizers can use"):
        said(changed(tokenizer=text), "text")


@pytest.mark.sampled(0.3, slow=0.5)
def test_padding_of_tokenizer_is_ignored(changed: Callable[..., Path]) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra families")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 1}, "a"))
    tokenizer.enable_padding(length=10**9, pad_id=10**9)
    assert said(changed(tokenizer=tokenizer.to_str().encode()), "b", max_new_tokens=2) == ""


@pytest.mark.slow
def test_commands_fail_in_one_line(changed: Callable[..., Path]) -> None:
    """With exit code 1, and no traceback."""
    folder = changed(hidden_size="32")
    commands = (
        ["experiments.generate", f"--model={folder}", "--prompt=1 2"],
        ["experiments.convert", str(folder), str(folder / "converted")],
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-m", *command], cwd=ROOT, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        for command in commands
    ]  # fmt: skip
    for process in running:
        out, errors = process.communicate(timeout=120)
        assert (process.returncode, out) == (1, "")
        *phases, line = errors.splitlines()
        assert all(each.endswith(" …") or each.startswith("still ") for each in phases)
        assert line.startswith("error: the config's hidden_size must be a whole number in 1")
