"""Folders with broken tokenizers: a one-line error, and no traceback."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


# A stand-in for the package, whose class raises plain exceptions as that does, or ends its process.
FAKE = """
import os, types

def fail(*_, **__):
    if {fails!r} == "panic":
        raise BaseException("bad")
    if {fails!r} == "abort":
        os.abort()
    raise Exception("bad\\n" * 99)

class Tokenizer:
    from_buffer = classmethod(lambda cls, _: cls())
    no_padding = no_truncation = lambda self: None
    get_vocab = lambda self, with_added_tokens: {{"a": {largest}}}
    encode = lambda self, _, add_special_tokens: types.SimpleNamespace(ids={ids})
    decode = lambda self, ids, **_: str(ids)

for name in {names}:
    setattr(Tokenizer, name, fail)
"""
WORDS = "must be a tokenizer that the package tokenizers can use, got"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"names": ["from_buffer"]}, f"{WORDS} 'bad"), ({"names": ["encode"]}, f"{WORDS} 'bad"),
        ({"names": ["decode"]}, f"{WORDS} 'bad"), ({"ids": []}, "have at least one t"),
        ({"names": ["encode"], "fails": "panic"}, f"{WORDS} 'bad'"),
        ({"names": ["encode"], "fails": "abort"}, f"{WORDS} 'no end of encode within its limits'"),
        ({"largest": 2**31}, f"{WORDS} 'ids up to 2147483648'"),
        ({"ids": [1] * 1005}, f"{WORDS} '1005 tokens for 4 characters'"),
        ({"ids": [1, 100]}, "ids of the prompt must be in 0 … 99, got 100; take weights and toke"),
    ],
)  # fmt: skip
def test_failing_tokenizer_raises_one_line(
    change: dict[str, Any], words: str, changed: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    pytest.importorskip("tokenizers", reason="needs the extra families")
    fake = {"names": [], "ids": [1], "fails": "", "largest": 99} | change
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "tokenizers.py").write_text(FAKE.format(**fake))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    with pytest.raises(RunError, match=words) as error:
        said(changed(tokenizer=b"{}"), "text")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


# Of 2 KB: each replacement makes ten characters of one.
GROWING = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10} for _ in range(15)
    ],
}


@pytest.mark.slow
def test_growing_tokenizer_ends_within_its_limits(
    changed: Callable[..., Path], tmp_path: Path
) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra families")
    sound = json.loads(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 1}, "a")).to_str())
    text = json.dumps(sound | {"normalizer": GROWING}).encode()
    assert len(text) < 2_500
    with pytest.raises(RunError, match=f"{WORDS} 'no end of encode within its limits'"):
        said(changed(tokenizer=text), "a")
    template = {
        "type": "TemplateProcessing", "pair": [],
        "single": [{"SpecialToken": {"id": "a", "type_id": 0}}] * 10**6,
        "special_tokens": {"a": {"id": "a", "ids": [1], "tokens": ["a"]}},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(sound | {"post_processor": template}))
    with pytest.raises(RunError, match=f"{WORDS} '1000000 tokens for 1 characters'"):
        said(tmp_path, "a")


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


@pytest.mark.sampled(0.13, slow=0.2)
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
