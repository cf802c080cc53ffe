"""The tokens of a text, by a Hugging Face tokenizer."""

import codecs
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.runs.failures import RunError

_INNER = bytes(range(0x80, 0xC0))  # the bytes that begin no character


class Tokenizer:
    """The tokens of a `tokenizer.json`, in place of `experiments.tasks.text.Bytes`.

    The start token is the last token of a newline, or token 0 if a newline has none.

    Args:
      path: the file.
    """

    def __init__(self, path: str) -> None:
        try:
            self._library = importlib.import_module("tokenizers")
        except ImportError:
            raise RunError(
                "config.data.tokenizer needs the package tokenizers; pip install tokenizers"
            ) from None
        try:
            self.file = Path(path).read_bytes() if Path(path).is_file() else b""
            self._tokenizer: Any = self._library.Tokenizer.from_buffer(self.file)
        except Exception as error:  # The library raises plain exceptions.
            raise RunError(
                f"config.data.tokenizer must be a tokenizer.json, got {path!r:.300}: {error!s:.100}"
            ) from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # Ids may have gaps.
        self.size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)

    def encode(self, text: bytes) -> np.ndarray:
        """Return the start token and those of a UTF-8 text, whose ends may cut a character."""
        try:
            whole = codecs.getincrementaldecoder("utf-8")().decode(text.lstrip(_INNER))
        except UnicodeDecodeError as error:
            raise RunError(f"a tokenizer needs a text in UTF-8: {error}; convert it") from None
        start = (self._ids("\n") or [0])[-1]
        return np.asarray([start, *self._ids(whole)], np.int32)

    def stream(self, before: np.ndarray) -> Callable[[int], str]:
        """Return a function from each next token to the characters that it completes."""
        decoder = self._library.decoders.DecodeStream(ids=before.tolist())
        return lambda token: decoder.step(self._tokenizer, token) or ""

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
