"""What a decoder of a Hugging Face folder makes of a prompt."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.failures import RunError
from flax_mha import generate, interop
from flax_mha.interop import files
from flax_mha.models import LanguageModel, Translator

_TOKENIZER = "tokenizer.json"


def respond(
    folder: str | Path, prompt: str, say: Callable[[str], None], max_new_tokens: int = 64,
    **options: Any,
) -> None:  # fmt: skip
    """Says how the prompt goes on, or what it becomes, piece by piece.

    Args:
      folder: `config.json`, safetensors, and `tokenizer.json` or, without it, a prompt of ids.
      prompt: a text, or ids such as "12 7 401".
      say: takes each piece.
      max_new_tokens: how many at most.
      **options: of `flax_mha.generate`.

    Raises:
      ValueError: if the folder or the prompt is not what it must be.
    """
    folder = Path(folder).expanduser()
    config = files.read_json(folder / "config.json")
    encode, decode = _tokenizer(folder)
    model, variables = interop.load(folder)
    if isinstance(model, Translator):
        if "decoder_start_token_id" not in config:
            raise RunError("config.json must have decoder_start_token_id, and has not")
        options["start"] = config["decoder_start_token_id"]
    elif not isinstance(model, LanguageModel):
        raise RunError(f"a {config['model_type']} writes no text; give a decoder, or a T5")
    # Small models keep the end of a large vocabulary, which they can't write.
    ends = np.atleast_1d(np.array(config.get("eos_token_id") or (), int))
    ends = ends[ends < config["vocab_size"]].tolist()
    tokens: list[int] = []
    said = ""

    def show(_: int, new: np.ndarray) -> None:
        nonlocal said
        if not {*tokens} & {*ends}:
            tokens.append(int(new[0]))
        text = decode([token for token in tokens if token not in ends])
        # A character of several tokens is not there before its last.
        if not text.endswith("�"):
            say(text[len(said) :])
            said = text

    # Several ends may be named, of which `generate` stops at the first alone.
    if options.get("beams", 1) == 1:
        options["callback"] = show
    ids = jnp.array([encode(prompt)], jnp.int32)
    found = generate(
        model, variables, ids, max_new_tokens=max_new_tokens, eos=ends[0] if ends else None,
        **options,
    )  # fmt: skip
    if "callback" not in options:
        for token in np.asarray(found.tokens[0]):
            show(0, token[None])
    # What was held back, if the text ends within a character.
    say(decode([token for token in tokens if token not in ends])[len(said) :])


def _tokenizer(folder: Path) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    """From text to ids and back."""
    if not (folder / _TOKENIZER).is_file():
        return _ids, lambda ids: " ".join(map(str, ids))
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ModuleNotFoundError:
        raise RunError(
            f"{folder / _TOKENIZER} needs the package tokenizers; pip install tokenizers"
        ) from None
    found = tokenizers.Tokenizer.from_file(str(folder / _TOKENIZER))
    return lambda text: found.encode(text).ids, found.decode


def _ids(text: str) -> list[int]:
    words = text.split()
    if not words or not all(word.isdecimal() for word in words):
        raise RunError(
            f"the folder has no {_TOKENIZER}: the prompt must be ids such as '12 7 401', got "
            f"{text!r}"
        )
    return [int(word) for word in words]
