"""The answers of trained tasks to a prompt: text that goes on, and translations."""

import codecs
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.common.failures import RunError
from experiments.tasks.task import Params
from experiments.tasks.text import Bytes
from flax_mha.models.generation import generate

Say = Callable[[str], None]  # takes each piece of an answer


def continue_text(
    task: Any, params: Params, prompt: str, say: Say, options: dict[str, Any]
) -> None:
    """Say how a text goes on, token by token, as far as the model's context reaches."""
    length = task.config.length
    given = task.vocabulary.encode(prompt.encode())[-length:]
    room = length - len(given) + 1
    count = options.pop("max_new_tokens", room)
    if not 1 <= count <= room:
        raise RunError(
            f"--max_new_tokens must be in 1 … {room}: the model has seen {length} "
            f"tokens at once, of which the prompt takes {len(given)}, got {count}"
        )
    read = stream(task.vocabulary, given)

    def show(step: int, tokens: np.ndarray) -> None:
        say("".join(map(read, tokens.tolist())))

    if options.get("beams", 1) == 1:
        options["callback"] = show
    tokens = jnp.asarray(given[None], jnp.int32)
    # Prompts of all lengths find the compiled step of one capacity again.
    options |= {"max_new_tokens": count, "capacity": length}
    found = generate(task.model, {"params": params}, tokens, **options)
    if "callback" not in options:
        show(count, np.asarray(found.tokens[0]))


def stream(vocabulary: Any, before: np.ndarray) -> Callable[[int], str]:
    """Return a function from each next token after some to the characters that it completes."""
    if not isinstance(vocabulary, Bytes):
        return vocabulary.stream(before)
    utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return lambda token: utf8.decode(bytes([token]))


def translate(task: Any, params: Params, prompt: str, say: Say, options: dict[str, Any]) -> None:
    """Say the target of a source, character by character unless beams are followed."""
    if not 1 <= len(prompt) <= task.source_length:
        raise RunError(
            f"--prompt must have 1 to {task.source_length} characters, as the sources that the "
            f"model has seen, got {len(prompt)}"
        )
    source = jnp.asarray(task.vocabulary.encode(prompt, task.source_length)[None])

    def show(step: int, tokens: np.ndarray) -> None:
        say(task.vocabulary.decode(tokens))

    if options.get("beams", 1) == 1:
        options["callback"] = show
    found = task.translate(params, source, jnp.asarray([len(prompt)]), **options)
    if "callback" not in options:
        say(task.vocabulary.decode(np.asarray(found.tokens[0])))


# By `config.task`: functions of a task, its parameters, a prompt, and options of
# `flax_mha.generate`. Other tasks make no text.
RESPOND: dict[str, Callable[[Any, Params, str, Say, dict[str, Any]], None]] = {
    "text": continue_text,
    "translation": translate,
}
