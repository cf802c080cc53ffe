"""Look at the attention heads of a trained run or a published model on a prompt.

    python -m experiments.look --workdir=runs/text-… --prompt="The import statement"
    python -m experiments.look --workdir=runs/text-… --prompt="a b" --beside="a c"
    python -m experiments.look --model=path/to/Qwen3-0.6B --prompt="12 7 401" --png=heads.png

It writes a page of HTML with the weights of every head (--out), and their picture if --png names
one. The attribution of a head is the gradient of the first prompt's largest next logit by a factor
on the head's output: to first order, the logit falls by it if the head is removed. The scores of
kinds of heads are those of `flax_mha.analysis.detect`, on the first prompt.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from experiments import command, finished, pretrained
from experiments.runs import log
from experiments.runs.failures import RunError
from experiments.tasks.text import Bytes, Text
from flax_mha import Capture, analysis, edits, plots
from flax_mha.layer import sown
from flax_mha.models import LanguageModel

WORKDIR = flags.DEFINE_string("workdir", None, "A run's folder.")
DATA = flags.DEFINE_string("data", None, "The file that the run was trained on, if it was one.")
TOKENIZER = flags.DEFINE_string("tokenizer", None, "The file of the run's tokenizer, if any.")
MODEL = flags.DEFINE_string("model", None, "A Hugging Face folder.")
PROMPT = flags.DEFINE_string("prompt", None, "The text to look at.", required=True)
BESIDE = flags.DEFINE_string("beside", None, "Another text of as many tokens, shown beside it.")
OUT = flags.DEFINE_string("out", "look.html", "The page to write.")
PNG = flags.DEFINE_string("png", None, "A picture of all heads to write.")

CAPTURE = Capture(("weights", "entropy", "max_logit"))


class Reader(NamedTuple):
    """A language model, and a function from a text to its ids and their names."""

    model: LanguageModel
    variables: Any
    read: Callable[[str], tuple[Sequence[int], list[str]]]


def main(argv: Sequence[str]) -> None:
    """Write the page, and the picture."""
    log.hush()
    try:
        if argv[1:]:
            raise RunError(f"unexpected {argv[1:]}; quote a prompt of several words")
        if (WORKDIR.value is None) == (MODEL.value is None):
            raise RunError("give --workdir, a run, or --model, a Hugging Face folder")
        if MODEL.value is None:
            reader = open_run(WORKDIR.value, DATA.value, TOKENIZER.value)
        else:
            reader = open_folder(MODEL.value)
        write(reader, PROMPT.value, BESIDE.value, OUT.value, PNG.value)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def open_run(workdir: str | Path, data: str | None = None, tokenizer: str | None = None) -> Reader:
    """Return the model of a run of the text task.

    Raises:
      ValueError: if there is no such run.
    """
    run, task = finished.open_run(workdir, data, tokenizer)
    if not isinstance(task, Text):
        raise RunError(f"{run.path} was trained on {run.config.task!r}; give a run of 'text'")
    params = finished.load(run, task).params
    if run.config.seeds > 1:
        params = jax.tree.map(lambda x: x[0], params)

    def read(text: str) -> tuple[Sequence[int], list[str]]:
        ids = task.vocabulary.encode(text.encode())[-task.config.length :].tolist()
        if isinstance(task.vocabulary, Bytes):
            return ids, [bytes([token]).decode("ascii", "backslashreplace") for token in ids]
        return ids, [task.vocabulary.stream(np.array([], np.int32))(token) for token in ids]

    return Reader(task.model, {"params": params}, read)


def open_folder(folder: str) -> Reader:
    """Return the language model of a Hugging Face folder.

    Raises:
      ValueError: if it holds no language model.
    """
    path = Path(folder).expanduser()
    model, variables, encode, decode = pretrained.open_model(path)
    if not isinstance(model, LanguageModel):
        raise RunError(f"{path} must hold a decoder, got a {type(model).__name__}; give another")

    def read(text: str) -> tuple[Sequence[int], list[str]]:
        ids = encode(text)
        return ids, [decode([token]) for token in ids]

    return Reader(model, variables, read)


def write(reader: Reader, prompt: str, beside: str | None, out: str, png: str | None) -> None:
    """Write the page of one or two prompts, and the picture of the first.

    Raises:
      ValueError: if the prompts differ in their number of tokens, or the page would be too large.
    """
    watched = analysis.watch(reader.model, CAPTURE)
    runs, tokens = {}, {}
    for text in filter(None, (prompt, beside)):
        ids, tokens[text] = reader.read(text)
        batch = jnp.asarray([ids], jnp.int32)
        _, runs[text] = jax.jit(
            lambda variables, batch: watched.apply(variables, batch, mutable="intermediates")
        )(reader.variables, batch)
    ids, names = reader.read(prompt)
    batch = jnp.asarray([ids], jnp.int32)
    attribution = attribute(reader.model, reader.variables, batch)
    scores = analysis.detect(reader.model, reader.variables, batch)
    analysis.report(out, runs, tokens, attribution=attribution, scores=scores)
    print(out)
    if png is not None:
        plots.heads(runs[prompt], names).savefig(png)
        print(png)


def attribute(model: LanguageModel, variables: Any, batch: jax.Array) -> list[np.ndarray]:
    """Return d logit / d factor of each head's output [heads] by layer, for the largest next logit.

    Source: Michel et al., "Are Sixteen Heads Really Better than One?", 2019.
    """
    ones = {
        name: edits.Edit(
            *(fill((*x.shape[:-4], 1, 1, x.shape[-2], 1)) for fill in (jnp.ones, jnp.zeros))
        )
        for name, x in edits.names(model, variables, batch).items()
        if name.endswith("attention_z")
    }
    attached = edits.attach(model, variables, ones, batch)

    @jax.jit
    def logit(changes: Any, variables: Any) -> jax.Array:
        return model.apply({**variables, "edits": changes}, batch)[0, -1].max()

    gradients = jax.grad(logit)(attached["edits"], variables)
    return [x.ravel() for x in sown.find(gradients, "attention_z/keep", 3).values()]


if __name__ == "__main__":
    app.run(main, flags_parser=command.parse)
