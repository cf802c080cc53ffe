"""Hugging Face folders in the commands: they generate text, and convert to checkpoints and back."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from experiments import generate as generate_command
from experiments.convert import convert
from experiments.runs.failures import RunError
from experiments.trained import pretrained
from flax_mha import generate, interop
from tests.support.oracle import random_like

SIZES = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48,
}  # fmt: skip
QWEN: dict[str, Any] = SIZES | {
    "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 1e6,
}  # fmt: skip
T5: dict[str, Any] = {
    "model_type": "t5", "vocab_size": 50, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1,
    "num_decoder_layers": 1, "num_heads": 4, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20, "layer_norm_epsilon": 1e-6, "dense_act_fn": "relu",
    "is_gated_act": False, "tie_word_embeddings": True, "decoder_start_token_id": 0,
}  # fmt: skip
BERT: dict[str, Any] = SIZES | {
    "model_type": "bert", "hidden_act": "gelu", "max_position_embeddings": 16,
    "type_vocab_size": 2, "layer_norm_eps": 1e-12,
}  # fmt: skip


def folder_of(config: dict[str, Any], path: Path) -> Path:
    """Save a model with random weights, and return its folder."""
    family = interop.family(config)
    variables = random_like(jax.eval_shape(family.module.init, jax.random.key(0), *family.example))
    interop.save(config, variables, path)
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


@pytest.mark.slow
def test_ids_prompt_generates_ids(qwen: Path) -> None:
    want = written(qwen, [12, 7, 40], 5)
    assert said(qwen, "12 7 40", max_new_tokens=5) == " ".join(map(str, want))
    wide = written(qwen, [12, 7, 40], 5, beams=2)
    assert said(qwen, "12 7 40", max_new_tokens=5, beams=2) == " ".join(map(str, wide))


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
def test_eos_is_not_printed(qwen: Path, several: bool, tmp_path: Path) -> None:
    """The config names one eos token, or several."""
    tokens = written(qwen, [1, 2, 3], 24)
    # The first token that differs from the start.
    at = next(i for i, token in enumerate(tokens) if token != tokens[0])
    never = next(i for i in range(100) if i not in tokens)
    (tmp_path / "model.safetensors").symlink_to(qwen / "model.safetensors")
    config = QWEN | {"eos_token_id": [never, tokens[at]] if several else tokens[at]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert said(tmp_path, "1 2 3", max_new_tokens=24) == " ".join(map(str, tokens[:at]))


@pytest.mark.slow
def test_t5_generates_from_its_start_token(tmp_path: Path) -> None:
    folder = folder_of(T5, tmp_path / "t5")
    want = written(folder, [5, 3, 9], 4, start=0)
    assert said(folder, "5 3 9", max_new_tokens=4) == " ".join(map(str, want))


@pytest.mark.sampled(0.13, slow=0.2)
def test_text_prompt_generates_text(qwen: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra families")
    for path in qwen.iterdir():
        (tmp_path / path.name).symlink_to(path)
    words = {f"w{i}": i for i in range(100)}
    model = tokenizers.models.WordLevel(words, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    want = " ".join(f"w{i}" for i in written(qwen, [12, 7, 40], 5))
    assert said(tmp_path, "w12 w7 w40", max_new_tokens=5) == want


@pytest.mark.sampled(0.13, slow=0.2)
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


def test_tokenizer_without_its_package_raises(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for path in qwen.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RunError, match="needs the package tokenizers; pip install tokenizers"):
        said(tmp_path, "text")


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("hello", "has no tokenizer.json: the prompt must be ids such as '12 7 401', got 'hello'"),
        ("", "must be ids"), ("1 -2", "must be ids"),
        ("1 100", r"ids of the prompt must be in 0 … 99, got 100; take"),
    ],
)  # fmt: skip
def test_invalid_prompts_raise(qwen: Path, prompt: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        said(qwen, prompt)


def test_model_without_generation_raises(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="a bert generates no text; give a decoder, or a T5"):
        said(folder_of(BERT, tmp_path / "bert"), "1 2")


def test_conversion_to_checkpoint_and_back_is_bitwise(qwen: Path, tmp_path: Path) -> None:
    """Orbax alone can restore the checkpoint in between."""
    told = convert(qwen, tmp_path / "ours")
    assert told.endswith("18,752 parameters of a qwen3, a checkpoint of Orbax")
    restored = ocp.StandardCheckpointer().restore(tmp_path / "ours" / "variables")
    jax.tree.map(np.testing.assert_array_equal, restored, interop.load(qwen)[1])
    convert(tmp_path / "ours", tmp_path / "back")
    name = "model.safetensors"
    assert (tmp_path / "back" / name).read_bytes() == (qwen / name).read_bytes()
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == QWEN | {
        "dtype": "float32"
    }


def test_converted_checkpoint_restores_as_numpy(qwen: Path, tmp_path: Path) -> None:
    convert(qwen, tmp_path / "ours")
    restored = ocp.StandardCheckpointer().restore(tmp_path / "ours" / "variables")
    assert {type(x) for x in jax.tree.leaves(restored)} == {np.ndarray}


def test_conversion_casts_to_dtype(qwen: Path, tmp_path: Path) -> None:
    convert(qwen, tmp_path / "ours", dtype="bfloat16")
    convert(qwen, tmp_path / "wide")
    convert(tmp_path / "wide", tmp_path / "back", dtype="bfloat16")
    want = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), interop.load(qwen)[1])
    found = ocp.StandardCheckpointer().restore(tmp_path / "ours" / "variables")
    for each in (found, interop.load(tmp_path / "back")[1]):
        jax.tree.map(np.testing.assert_array_equal, each, want)
        assert {x.dtype.name for x in jax.tree.leaves(each)} == {"bfloat16"}


def test_invalid_conversions_raise(qwen: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json is not there; give the folder of"):
        convert(tmp_path / "none", tmp_path / "a")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(RunError, match="the second folder must be a new or empty folder"):
        convert(qwen, tmp_path / "full")
    with pytest.raises((TypeError, ValueError), match="dtype must be"):
        convert(qwen, tmp_path / "b", dtype="int8")
    assert not (tmp_path / "b" / "variables").exists()


def test_checkpoint_of_other_heads_is_not_converted(qwen: Path, tmp_path: Path) -> None:
    convert(qwen, tmp_path / "ours")
    other = json.dumps(QWEN | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16})
    (tmp_path / "ours" / "config.json").write_text(other)
    with pytest.raises(ValueError, match=r"kernel \(\[32, 4, 8\] in place of \[32, 2, 16\]\)"):
        convert(tmp_path / "ours", tmp_path / "back")


def test_control_characters_of_a_tokenizer_do_not_reach_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    generate_command._say("a\x1b[31m\x9b\0\r\n\té–日🙂\x7f")
    assert capsys.readouterr().out == "a\\x1b[31m\\x9b\\x00\\x0d\n\té–日🙂\\x7f"
