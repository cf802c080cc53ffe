"""The attention heads of a trained run, or of a Hugging Face folder, on a page.

Source: Michel et al., "Are Sixteen Heads Really Better than One?", 2019 (attribution).
"""

import functools
from collections.abc import Callable, Sequence
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
from flax_mha import Capture, analysis, edits, plots
from flax_mha.models import LanguageModel
from flax_mha.taps import sown

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
    return _batch(ids), names


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


def _batch(ids: Sequence[int]) -> jax.Array:
    return jnp.asarray([ids], jnp.int32)


def open_folder(folder: str) -> Reader:
    """Return the language model of a Hugging Face folder."""
    path = Path(folder).expanduser()
    model, variables, encode, decode = pretrained.open_model(path)
    if not isinstance(model, LanguageModel):
        raise RunError(f"{path} must hold a decoder, got a {type(model).__name__}; give another")

    def read(text: str) -> tuple[jax.Array, list[str]]:
        ids = encode(text)
        return _batch(ids), [decode([token]) for token in ids]

    return Reader(model, variables, read)


def write(reader: Reader, prompt: str, beside: str | None, out: Path, png: Path | None) -> None:
    """Write the page of one or two prompts, and the picture of the first."""
    apply = functools.partial(
        analysis.watch(reader.model, CAPTURE).apply, deterministic=True, mutable="intermediates"
    )
    texts = (prompt,) if beside is None else (prompt, beside)
    read = {text: reader.read(text) for text in texts}
    tokens = {text: names for text, (_, names) in read.items()}
    batches = {text: batch for text, (batch, _) in read.items()}
    runs = {text: jax.jit(apply)(reader.variables, batch)[1] for text, batch in batches.items()}
    inputs = reader.model, reader.variables, batches[prompt]
    scores: dict[str, Any] = {"attribution": attribute(*inputs)}
    if isinstance(reader.model, LanguageModel):
        scores |= analysis.detect(*inputs, deterministic=True)
    analysis.report(out, runs, tokens, scores=scores)
    print(out)
    if png is not None:
        save(plots.heads(runs[prompt], tokens[prompt]), png, 100)
        print(png)


def attribute(model: Any, variables: Any, batch: jax.Array) -> list[np.ndarray]:
    """Return d logit / d factor of each head's output [heads] by layer, for the largest logit."""
    ones = {}
    for name, x in edits.names(model, variables, batch, deterministic=True).items():
        if name.endswith("attention_z"):
            shape = (*x.shape[:-4], 1, 1, x.shape[-2], 1)
            ones[name] = edits.Edit(jnp.ones(shape), jnp.zeros(shape))
    attached = edits.attach(model, variables, ones, batch, deterministic=True)

    @jax.jit
    def logit(changes: Any, variables: Any) -> jax.Array:
        changed = {**variables, "edits": changes}
        # Those of the last token, or of the whole image.
        return jnp.atleast_2d(model.apply(changed, batch, deterministic=True)[0])[-1].max()

    gradients = jax.grad(logit)(attached["edits"], variables)
    keep = jax.tree.map(lambda x: x.keep, gradients, is_leaf=lambda x: isinstance(x, edits.Edit))
    return [x.ravel() for x in sown.find(keep, "attention_z", 3).values()]
