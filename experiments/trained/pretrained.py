"""Generate text from a prompt with the model in a Hugging Face folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from experiments.common.failures import RunError
from flax_mha import generate, interop
from flax_mha.interop import safetensors
from flax_mha.interop.checked_config import FileSettings
from flax_mha.interop.folders import open_folder
from flax_mha.models import LanguageModel, Translator

_TOKENIZER = "tokenizer.json"
Encode: TypeAlias = Callable[[str], list[int]]
Decode: TypeAlias = Callable[[list[int]], str]


def respond(
    folder: str | Path, prompt: str, say: Callable[[str], None], max_new_tokens: int = 64,
    **options: Any,
) -> None:  # fmt: skip
    """Generate from a prompt with the folder's model, and pass the text to `say` piece by piece.

    Args:
      folder: `config.json`, safetensors, and `tokenizer.json`, or without it a prompt of ids.
      prompt: a text, or ids such as "12 7 401".
      say: a function that takes each piece.
      max_new_tokens: the maximum number of new tokens.
      **options: further arguments of `flax_mha.generate`.
    """
    folder = open_folder(folder)
    model, variables, encode, decode = open_model(folder)
    said_there = interop.generation(folder)
    if isinstance(model, Translator) and model.reads_tokens:
        if "start" not in said_there:
            raise RunError("config.json must have decoder_start_token_id, got none")
        options["start"] = said_there["start"]
    elif not isinstance(model, LanguageModel):
        kind = safetensors.read_json(folder / "config.json")["model_type"]
        raise RunError(f"a {kind} generates no text; give a decoder, or a T5")
    ids = encode(prompt)
    ends = said_there.get("eos", ())
    tokens: list[int] = []
    said = ""

    def show(_: int, new: np.ndarray) -> None:
        nonlocal said
        if not {*tokens} & {*ends}:
            tokens.append(int(new[0]))
        text = decode([token for token in tokens if token not in ends])
        # A character of several tokens is complete only with the last one.
        if not text.endswith("�"):
            say(text[len(said) :])
            said = text

    if options.get("beams", 1) == 1:
        options["callback"] = show
    options |= {"max_new_tokens": max_new_tokens, "eos": ends or None}
    found = generate(model, variables, jnp.array([ids], jnp.int32), **options)
    if "callback" not in options:
        for token in np.asarray(found.tokens[0]):
            show(0, token[None])
    # Print the rest, if the text ends within a character.
    say(decode([token for token in tokens if token not in ends])[len(said) :])


def open_model(folder: Path) -> tuple[Any, Any, Encode, Decode]:
    """Return the folder's model, its variables, and functions from a prompt to ids and back."""
    config = FileSettings(safetensors.read_json(folder / "config.json"))
    find_ids, decode = _tokenizer(folder)
    model, variables = interop.load(folder)

    def encode(prompt: str) -> list[int]:
        ids, size = find_ids(prompt), config["vocab_size"]
        if not ids:
            raise RunError(f"the prompt must have at least one token, got none in {prompt!r:.100}")
        if max(ids) >= size:
            raise RunError(
                f"the ids of the prompt must be in 0 … {size - 1}, got {max(ids)}; take weights "
                f"and {_TOKENIZER} from one model"
            )
        return ids

    return model, variables, encode, decode


def _tokenizer(folder: Path) -> tuple[Encode, Decode]:
    """Return functions from text to ids and back."""
    path = folder / _TOKENIZER
    if not path.exists():
        return _ids, lambda ids: " ".join(map(str, ids))
    from experiments.tasks.tokenizer import Tokenizer

    tokenizer = Tokenizer(path)
    return tokenizer.encode_prompt, tokenizer.decode


def _ids(text: str) -> list[int]:
    words = text.split()
    if not words or not all(word.isdecimal() and len(word) < 20 for word in words):
        raise RunError(
            f"the folder has no {_TOKENIZER}: the prompt must be ids such as '12 7 401', got "
            f"{text!r:.100}"
        )
    return [int(word) for word in words]
