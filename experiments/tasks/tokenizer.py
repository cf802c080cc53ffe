"""The tokens of a text, by the `tokenizer.json` of a Hugging Face folder."""

import codecs
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from experiments.common.failures import RunError
from experiments.tasks.checks import read_file

_INNER = bytes(range(0x80, 0xC0))  # the bytes that begin no character


class Tokenizer:
    """The tokens of a `tokenizer.json`, in place of `experiments.tasks.text.Bytes`.

    The start token is the last token of a newline, or token 0 if a newline has none.

    Args:
      path: the file.

    Attributes:
      file: the bytes of the file.
      size: the number of tokens, gaps included.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            import tokenizers
        except ImportError:
            raise RunError(f"{path} needs the package tokenizers; pip install tokenizers") from None
        self._path, self._library = path, tokenizers
        self.file = read_file(str(path), key="the tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(self.file)
        except Exception as error:  # The library raises plain exceptions.
            raise RunError(f"{path} must be a tokenizer.json, got: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)

    def encode(self, text: bytes) -> np.ndarray:
        """Return the start token and those of a UTF-8 text, whose ends may cut a character."""
        try:
            whole = codecs.getincrementaldecoder("utf-8")().decode(text.lstrip(_INNER))
        except UnicodeDecodeError as error:
            raise RunError(f"a tokenizer needs a text in UTF-8: {error}; convert it") from None
        ids = self._ids(whole)
        # Some put a space in front of the first word.
        back = self._tokenizer.decode(ids, skip_special_tokens=False).lstrip()
        if back != whole.lstrip():
            raise RunError(
                f"{self._path} must give back the text that it encodes, got {back!r:.60} for "
                f"{whole!r:.60}; give a tokenizer that keeps all of it"
            )
        return np.asarray([(self._ids("\n") or [0])[-1], *ids], np.int32)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with those that the file puts around it."""
        return self._ids(text, special=True)

    def _ids(self, text: str, special: bool = False) -> list[int]:
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        except Exception as error:
            raise RunError(f"{self._path} can't encode {text!r:.60}: {error}") from error
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        text: str = self._tokenizer.decode(ids)
        return text

    def stream(self, before: np.ndarray) -> Callable[[int], str]:
        """Return a function from each next token to the characters that it completes."""
        decoder = self._library.decoders.DecodeStream(ids=before.tolist())
        return lambda token: decoder.step(self._tokenizer, int(token)) or ""
