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

from experiments import finished, pretrained
from experiments.plots import save
from experiments.runs.failures import RunError
from experiments.tasks.text import Bytes, Text
from flax_mha import Capture, analysis, edits, plots
from flax_mha.models import LanguageModel
from flax_mha.taps import sown

CAPTURE = Capture(("weights", "entropy", "max_logit"))


class Reader(NamedTuple):
    """A language model, and a function from a text to its ids and their names."""

    model: Any
    variables: Any
    read: Callable[[str], tuple[Sequence[int], list[str]]]


def open_run(workdir: str | Path, data: str | None = None, tokenizer: str | None = None) -> Reader:
    """Return the model of a run of the text task."""
    run, task = finished.open_run(workdir, data, tokenizer)
    if not isinstance(task, Text):
        raise RunError(f"{run.path} was trained on {run.config.task!r}; give a run of 'text'")
    params = finished.load(run, task).params

    def read(text: str) -> tuple[Sequence[int], list[str]]:
        ids = task.vocabulary.encode(text.encode())[-task.config.length :].tolist()
        if isinstance(task.vocabulary, Bytes):
            return ids, [bytes([token]).decode("ascii", "backslashreplace") for token in ids]
        return ids, [task.vocabulary.stream(np.array([], np.int32))(token) for token in ids]

    return Reader(task.model, {"params": params}, read)


def open_folder(folder: str) -> Reader:
    """Return the language model of a Hugging Face folder."""
    path = Path(folder).expanduser()
    model, variables, encode, decode = pretrained.open_model(path)
    if not isinstance(model, LanguageModel):
        raise RunError(f"{path} must hold a decoder, got a {type(model).__name__}; give another")

    def read(text: str) -> tuple[Sequence[int], list[str]]:
        ids = encode(text)
        return ids, [decode([token]) for token in ids]

    return Reader(model, variables, read)


def write(reader: Reader, prompt: str, beside: str | None, out: Path, png: Path | None) -> None:
    """Write the page of one or two prompts, and the picture of the first."""
    apply = functools.partial(
        analysis.watch(reader.model, CAPTURE).apply, deterministic=True, mutable="intermediates"
    )
    texts = (prompt,) if beside is None else (prompt, beside)
    read = {text: reader.read(text) for text in texts}
    tokens = {text: names for text, (_, names) in read.items()}
    batches = {text: jnp.asarray([ids], jnp.int32) for text, (ids, _) in read.items()}
    runs = {text: jax.jit(apply)(reader.variables, batch)[1] for text, batch in batches.items()}
    attribution = attribute(reader.model, reader.variables, batches[prompt])
    scores = analysis.detect(reader.model, reader.variables, batches[prompt], deterministic=True)
    analysis.report(out, runs, tokens, scores={"attribution": attribution, **scores})
    print(out)
    if png is not None:
        save(plots.heads(runs[prompt], tokens[prompt]), png, 100)
        print(png)


def attribute(model: Any, variables: Any, batch: jax.Array) -> list[np.ndarray]:
    """Return d logit / d factor of each head's output [heads] by layer, for the likeliest token."""
    ones = {}
    for name, x in edits.names(model, variables, batch, deterministic=True).items():
        if name.endswith("attention_z"):
            shape = (*x.shape[:-4], 1, 1, x.shape[-2], 1)
            ones[name] = edits.Edit(jnp.ones(shape), jnp.zeros(shape))
    attached = edits.attach(model, variables, ones, batch, deterministic=True)

    @jax.jit
    def logit(changes: Any, variables: Any) -> jax.Array:
        changed = {**variables, "edits": changes}
        return model.apply(changed, batch, deterministic=True)[0, -1].max()

    gradients = jax.grad(logit)(attached["edits"], variables)
    return [x.ravel() for x in sown.find(gradients, "attention_z/keep", 3).values()]
