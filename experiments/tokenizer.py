"""The tokens of a text, by a Hugging Face tokenizer, which works in a process of its own.

The file may be anybody's, and 2 KB of it can ask for any memory and time: that process has limits.
"""

import codecs
import contextlib
import importlib.util
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.runs import files
from experiments.runs.failures import RunError

_INNER = bytes(range(0x80, 0xC0))  # the bytes that begin no character
_ROOT = Path(__file__).parent.parent
# The limits: seconds and bytes for any request, and more for each byte of it.
_SECONDS, _BYTES = (30, 1 / 20_000), (2**32, 500)
_SPECIAL = 1000  # tokens that may come in addition to one for each byte


class Tokenizer:
    """The tokens of a `tokenizer.json`, in place of `experiments.tasks.text.Bytes`.

    The start token is the last token of a newline, or token 0 if a newline has none.

    Args:
      path: the file.
    """

    def __init__(self, path: str | Path) -> None:
        if importlib.util.find_spec("tokenizers") is None:
            raise RunError(f"{path} needs the package tokenizers; pip install tokenizers")
        self._path, self.file = path, files.read_data(str(path), key="the tokenizer.json")
        paths = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(_ROOT)])
        self._child = subprocess.Popen(
            [sys.executable, "-c", "from experiments import tokenizer; tokenizer.serve()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True, env=os.environ | {"PYTHONPATH": paths}, text=True,
        )  # fmt: skip
        weakref.finalize(self, _end, self._child)
        self.size = self._ask("open", self.file.decode("latin-1"))

    def encode(self, text: bytes) -> np.ndarray:
        """Return the start token and those of a UTF-8 text, whose ends may cut a character."""
        try:
            whole = codecs.getincrementaldecoder("utf-8")().decode(text.lstrip(_INNER))
        except UnicodeDecodeError as error:
            raise RunError(f"a tokenizer needs a text in UTF-8: {error}; convert it") from None
        ids, lost = self._ask("encode_all", whole)
        if lost:
            raise RunError(
                f"{self._path} must give back the text that it encodes, got {lost[1]!r} for "
                f"{lost[0]!r}; give a tokenizer that keeps all of it"
            )
        start = ([*self._ask("encode_all", "\n")[0]] or [0])[-1]
        return np.asarray([start, *ids], np.int32)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with those that the file puts around it."""
        ids: list[int] = self._ask("encode", text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        text: str = self._ask("decode", ids)
        return text

    def stream(self, before: np.ndarray) -> Callable[[int], str]:
        """Return a function from each next token to the characters that it completes."""
        number = self._ask("stream", before.tolist())
        return lambda token: self._ask("step", [number, token])

    def _ask(self, name: str, value: Any) -> Any:
        """Return the answer of the other process."""
        try:
            print(json.dumps([name, value]), file=self._child.stdin, flush=True)
            is_good, answer = json.loads(self._child.stdout.readline())  # type: ignore[union-attr]
        except (OSError, ValueError):  # The process has ended.
            is_good, answer = False, f"no end of {name.partition('_')[0]} within its limits"
        if not is_good:
            raise RunError(
                f"{self._path} must be a tokenizer that the package tokenizers can use, got "
                f"{answer!r:.200}; give another file"
            )
        return answer


def _end(child: subprocess.Popen[str]) -> None:
    """End the process, and close its pipes."""
    child.kill()
    with contextlib.suppress(OSError), child:
        pass


class _Library:
    """The library's side of `Tokenizer`, with a method for each request."""

    def open(self, file: str) -> int:
        self._tokenizers = importlib.import_module("tokenizers")
        self._tokenizer: Any = self._tokenizers.Tokenizer.from_buffer(file.encode("latin-1"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._streams: list[Any] = []
        # Ids may have gaps.
        size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        if size > 2**31:
            raise ValueError(f"ids up to {size - 1}")
        return size

    def encode(self, text: str, special: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        if len(ids) > len(text.encode()) + _SPECIAL:
            raise ValueError(f"{len(ids)} tokens for {len(text)} characters")
        return ids

    def encode_all(self, text: str) -> tuple[list[int], tuple[str, str] | None]:
        ids = self.encode(text, special=False)
        # Some put a space in front of the first word.
        said, back = text.lstrip(), self._tokenizer.decode(ids, skip_special_tokens=False).lstrip()
        if said == back:
            return ids, None
        pairs = enumerate(itertools.zip_longest(said, back))
        at = max(0, next(i for i, (a, b) in pairs if a != b) - 5)
        return ids, (said[at : at + 20], back[at : at + 20])

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids)
        return text

    def stream(self, before: list[int]) -> int:
        self._streams.append(self._tokenizers.decoders.DecodeStream(ids=before))
        return len(self._streams) - 1

    def step(self, request: list[int]) -> str:
        number, token = request
        return self._streams[number].step(self._tokenizer, token) or ""


def serve() -> None:
    """Answer the requests of a `Tokenizer`, a line of JSON each, within limits of each."""
    library, answers = _Library(), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # The library may print.
    for line in sys.stdin:
        name, value = json.loads(line)
        signal.alarm(int(_SECONDS[0] + len(line) * _SECONDS[1]))  # It kills.
        with contextlib.suppress(OSError, ValueError):  # macOS has no such limit.
            resource.setrlimit(resource.RLIMIT_AS, (_BYTES[0] + len(line) * _BYTES[1], -1))
        try:
            answer = [True, getattr(library, name)(value)]
        except BaseException as error:  # The library raises plain exceptions, and panics.
            answer = [False, str(error)]
        print(json.dumps(answer), file=answers, flush=True)
        signal.alarm(0)
