"""The attention heads of a trained run, or of a Hugging Face folder, on a page."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common.failures import RunError
from experiments.common.plots import save
from experiments.tasks.digits import Digits
from experiments.tasks.text import Bytes, Text
from experiments.trained import pretrained
from experiments.trained import run as trained
from flax_mha import Capture, analysis, plots
from flax_mha.models import LanguageModel

CAPTURE = Capture(("weights", "entropy", "max_logit"))


class Reader(NamedTuple):
    """A model, and a function from a prompt to a batch of one example and its tokens' names."""

    model: Any
    variables: Any
    read: Callable[[str], tuple[jax.Array, list[str]]]


def open_run(workdir: str | Path, data: str | None = None, tokenizer: str | None = None) -> Reader:
    """Return the model of a run of the text task, or of the digits, whose prompts are numbers."""
    run, task, params = trained.open_run(workdir, data, tokenizer)
    if not isinstance(task, Text | Digits):
        raise RunError(
            f"{run.path} was trained on {run.config.task!r}; give a run of 'text' or 'digits'"
        )
    return Reader(task.model, {"params": params}, functools.partial(_READS[type(task)], task))


def _read_text(task: Text, text: str) -> tuple[jax.Array, list[str]]:
    ids = task.vocabulary.encode(text.encode())[-task.config.length :].tolist()
    if isinstance(task.vocabulary, Bytes):
        names = [bytes([token]).decode("ascii", "backslashreplace") for token in ids]
    else:
        names = [task.vocabulary.stream(np.array([], np.int32))(token) for token in ids]
    return jnp.asarray([ids], jnp.int32), names


def _read_image(task: Digits, number: str) -> tuple[jax.Array, list[str]]:
    """Return the test image of a number, and the row and the column of each patch."""
    images = task.test["image"]
    if not number.isdecimal() or int(number) >= len(images):
        raise RunError(
            f"--prompt must be the number of a test image, 0 … {len(images) - 1}, got {number!r}"
        )
    image = jnp.asarray(images[int(number)])[None, ..., None]
    height, width = (size // task.config.model.patch_size for size in image.shape[1:3])
    return image, [f"{i},{j}" for i in range(height) for j in range(width)]


_READS: dict[type, Callable[..., tuple[jax.Array, list[str]]]] = {
    Text: _read_text, Digits: _read_image,
}  # fmt: skip


def open_folder(folder: str) -> Reader:
    """Return the language model of a Hugging Face folder."""
    path = Path(folder).expanduser()
    model, variables, encode, decode = pretrained.open_model(path)
    if not isinstance(model, LanguageModel):
        raise RunError(f"{path} must hold a decoder, got a {type(model).__name__}; give another")

    def read(text: str) -> tuple[jax.Array, list[str]]:
        ids = encode(text)
        return jnp.asarray([ids], jnp.int32), [decode([token]) for token in ids]

    return Reader(model, variables, read)


def write(reader: Reader, prompt: str, beside: str | None, out: Path, png: Any) -> None:
    """Write the page of one or two prompts, and the picture of the first."""
    apply = functools.partial(
        analysis.watch(reader.model, CAPTURE).apply, deterministic=True, mutable="intermediates"
    )
    texts = (prompt,) if beside is None else (prompt, beside)
    read = {text: reader.read(text) for text in texts}
    tokens = {text: names for text, (_, names) in read.items()}
    batches = {text: batch for text, (batch, _) in read.items()}
    runs = {text: jax.jit(apply)(reader.variables, batch)[1] for text, batch in batches.items()}
    scores: Any = None
    if isinstance(reader.model, LanguageModel):
        inputs = reader.model, reader.variables, batches[prompt]
        scores = analysis.detect(*inputs, deterministic=True)
    analysis.report(out, runs, tokens, scores=scores)
    print(out)
    if png:
        save(plots.heads(runs[prompt], tokens[prompt]), png, 100)
        print(png)
