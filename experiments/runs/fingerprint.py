"""A hash of a task's data: a run, and everything made of it, are about those data."""

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def _images(task: Any) -> bytes:
    return b"".join(x.tobytes() for split in (task.train, task.test) for x in split.values())


def _text(task: Any) -> bytes:
    return bytes(task.train) + b"\0" + bytes(task.test)


def _tokens(task: Any) -> bytes:
    file: bytes = task.vocabulary.file
    return _text(task) + (b"\0" + file if file else b"")


def _pairs(task: Any) -> bytes:
    pairs = [*task.split.sample, *task.split.test, *task.split.unseen]
    return "\n".join(map("\t".join, pairs)).encode()


def _batches(task: Any) -> bytes:
    batches = [*task.test_batches(), next(iter(task.batches(0, 64, np.arange(64))))]
    return b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(batches))


# By `config.task`: the bytes that each is known by.
_BYTES: dict[str, Callable[[Any], bytes]] = {
    "digits": _images, "masked": _text, "text": _tokens, "translation": _pairs,
}  # fmt: skip


def fingerprint(task: Any) -> str:
    """Return the SHA-256 of a task's data: of its own, or of its held-out and first batches."""
    return hashlib.sha256(_BYTES.get(task.config.task, _batches)(task)).hexdigest()
