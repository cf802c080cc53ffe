"""Hugging Face folders in the commands: they generate text, and convert to checkpoints and back."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import generate as generate_command
from experiments.common.failures import RunError
from experiments.convert import convert
from experiments.trained import pretrained
from flax_mha import generate, interop
from tests.interop.test_files import variables
from tests.interop.test_published_checkpoints import BERT, T5
from tests.support import pages

QWEN: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 1e6,
}  # fmt: skip


def folder_of(config: dict[str, Any], path: Path) -> Path:
    """Save a model with random weights, and return its folder."""
    interop.save(config, variables(config), path)
    return path


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(QWEN, tmp_path_factory.mktemp("qwen") / "model")


def said(folder: Path, prompt: str, **options: Any) -> str:
    pieces: list[str] = []
    pretrained.respond(folder, prompt, pieces.append, **options)
    return "".join(pieces)


def written(folder: Path, ids: list[int], count: int, **options: Any) -> list[int]:
    found = generate(
        *interop.load(folder), jnp.array([ids]), max_new_tokens=count, **options
    )  # fmt: skip
    return np.asarray(found.tokens[0]).tolist()


def changed(folder: Path, path: Path, tokenizer: str = "", **change: Any) -> Path:
    """Return a folder of the same weights, with another config, and a tokenizer or none."""
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").symlink_to(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | change
    (path / "config.json").write_text(json.dumps(config))
    if tokenizer:
        (path / "tokenizer.json").write_text(tokenizer)
    return path


@pytest.mark.slow
def test_ids_prompt_generates_ids(qwen: Path, tmp_path: Path) -> None:
    """Without the eos tokens of the config, or from its start token."""
    tokens = written(qwen, [12, 7, 40], 24)
    assert said(qwen, "12 7 40", max_new_tokens=24) == " ".join(map(str, tokens))
    wide = written(qwen, [12, 7, 40], 5, beams=2)
    assert said(qwen, "12 7 40", max_new_tokens=5, beams=2) == " ".join(map(str, wide))
    # The first token that differs from the start.
    at = next(i for i, token in enumerate(tokens) if token != tokens[0])
    never = next(i for i in range(100) if i not in tokens)
    for name, eos in (("one", tokens[at]), ("several", [never, tokens[at]])):
        folder = changed(qwen, tmp_path / name, eos_token_id=eos)
        assert said(folder, "12 7 40", max_new_tokens=24) == " ".join(map(str, tokens[:at]))
    folder = folder_of(T5 | {"decoder_start_token_id": 0}, tmp_path / "t5")
    want = written(folder, [5, 3, 9], 4, start=0)
    assert said(folder, "5 3 9", max_new_tokens=4) == " ".join(map(str, want))


@pytest.mark.sampled(0.08)
def test_text_prompt_generates_text(qwen: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra families")
    words = {f"w{i}": i for i in range(100)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = changed(qwen, tmp_path, tokenizer.to_str())
    want = " ".join(f"w{i}" for i in written(qwen, [12, 7, 40], 5))
    assert said(folder, "w12 w7 w40", max_new_tokens=5) == want


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("beams", [1, 2])
def test_characters_of_several_tokens_are_printed_whole(
    qwen: Path, beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is printed as it is at the end."""

    def decode(ids: list[int]) -> str:
        return "ä" * (len(ids) // 2) + "\ufffd" * (len(ids) % 2)

    monkeypatch.setattr(pretrained, "_tokenizer", lambda _: (lambda _: [1, 2, 3], decode))
    pieces: list[str] = []
    pretrained.respond(qwen, "", pieces.append, max_new_tokens=5, beams=beams)
    assert [piece for piece in pieces if piece] == ["ä", "ä", "\ufffd"]


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("hello", "has no tokenizer.json: the prompt must be ids such as '12 7 401', got 'hello'"),
        ("9" * 5000, "the prompt must be ids such as '12 7 401', got '999"),
        ("1 99999999999", "ids of the prompt must be in 0 … 99, got 99999999999; take"),
    ],
)
def test_invalid_prompts_raise(qwen: Path, prompt: str, told: str) -> None:
    with pytest.raises(RunError, match=told) as error:
        said(qwen, prompt)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    "tokenizer",
    ["{}", "[1", '{"model": {"type": "WordLevel", "vocab": {}, "unk_token": "?"}}'],
    ids=["empty", "cut off", "unknown"],
)
def test_broken_tokenizer_is_named(qwen: Path, tokenizer: str, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the extra families")
    with pytest.raises(RunError, match=r"must be a tokenizer.json, got: |can.t encode"):
        said(changed(qwen, tmp_path, tokenizer), "text")


@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_conversion_to_checkpoint_and_back_is_bitwise(
    qwen: Path, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orbax alone can restore the checkpoint in between, by the code of the page."""
    monkeypatch.chdir(tmp_path)
    options = {"dtype": dtype} if dtype else {}
    told = convert(qwen, tmp_path / "converted", **options)
    assert told.endswith("18,752 parameters of a qwen3, a checkpoint of Orbax")
    restored = pages.run("docs/commands.md")["variables"]
    want = jax.tree.map(lambda x: x.astype(dtype or x.dtype), interop.load(qwen)[1])
    jax.tree.map(np.testing.assert_array_equal, restored, want)
    assert {type(x) for x in jax.tree.leaves(restored)} == {np.ndarray}
    convert(tmp_path / "converted", tmp_path / "back", **options)
    jax.tree.map(np.testing.assert_array_equal, interop.load(tmp_path / "back")[1], want)
    told = json.loads((tmp_path / "back" / "config.json").read_text())
    assert told == QWEN | {"dtype": dtype or "float32"}


def test_what_cannot_be_converted_is_refused(qwen: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        convert(tmp_path / "none", tmp_path / "a")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(RunError, match="the second folder must be a new or empty folder"):
        convert(qwen, tmp_path / "full")
    convert(qwen, tmp_path / "ours")
    other = json.dumps(QWEN | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16})
    (tmp_path / "ours" / "config.json").write_text(other)
    with pytest.raises(ValueError, match=r"kernel \(\[32, 4, 8\] in place of \[32, 2, 16\]\)"):
        convert(tmp_path / "ours", tmp_path / "back")
    with pytest.raises(RunError, match="a bert generates no text; give a decoder, or a T5"):
        said(folder_of(BERT, tmp_path / "bert"), "1 2")


def test_control_characters_of_a_tokenizer_do_not_reach_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    generate_command._say("a\x1b[31m\x9b\0\r\n\té–日🙂\x7f")
    assert capsys.readouterr().out == "a\\x1b[31m\\x9b\\x00\\x0d\n\té–日🙂\\x7f"
