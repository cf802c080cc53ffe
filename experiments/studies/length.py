"""Length: which encoding of positions carries a learned algorithm to longer inputs?

    python -m experiments.studies.length --figure=docs/_static/studies/length.png

Decoders learn to copy or to sort n ≤ 8 tokens, and are tested with up to 32. An output is exact if
the model predicts all of its tokens, and the end, from the true tokens before, which is when greedy
decoding gives it. It takes 4 minutes of processor time. The answer is in docs/studies/length.md.
Source: Kazemnejad et al., arXiv 2305.19466.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.studies import base
from experiments.studies.figures import COLORS, draw_band, make_panels, save, spread
from experiments.tasks.task import Batch, Params
from flax_mha import LanguageModel, MultiHeadAttention
from flax_mha.positions import Rotary
from flax_mha.scores import Alibi, RelativeBias

TOKENS, LONGEST, FEATURES, TESTED = 8, 8, 48, 128
START, END = TOKENS, TOKENS + 1  # the tokens before and after an output
LENGTHS = (2, 4, 6, 8, 9, 10, 12, 14, 16, 20, 24, 32)
ENCODINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "T5 bias": {"scores": (RelativeBias(bidirectional=False),)},
    "ALiBi": {"scores": (Alibi(),)},
    "RoPE": {"rotary": Rotary()},
}
TASKS = ("copy", "sort")


def make(task: str, key: jax.Array, n: jax.Array, longest: int) -> Batch:
    """Return rows x₁ … xₙ START y₁ … yₙ END END …, with weights at y and the first END.

    The lengths n are [rows], and the rows have room for the longest.
    """
    n = n[:, None]
    x = jax.random.randint(key, (len(n), longest), 0, TOKENS)
    x = jnp.where(jnp.arange(longest) < n, x, END)
    y = jnp.sort(x, -1) if task == "sort" else x
    at = jnp.arange(2 * longest + 2)
    from_x, from_y = (
        jnp.take_along_axis(z, jnp.clip(i, 0, longest - 1), 1)
        for z, i in ((x, jnp.broadcast_to(at, (len(n), len(at)))), (y, at - n - 1))
    )
    row = jnp.where(at < n, from_x, jnp.where(at == n, START, from_y))
    row = jnp.where(at > 2 * n, END, row)
    weight = (at >= n) & (at <= 2 * n)
    return {"tokens": row[:, :-1], "labels": row[:, 1:], "weight": weight[:, :-1]}


def draw(task: str, key: jax.Array, rows: int = 24) -> Batch:
    """Return rows of lengths 1 … LONGEST."""
    of_lengths, of_tokens = jax.random.split(key)
    n = jax.random.randint(of_lengths, (rows,), 1, LONGEST + 1)
    return make(task, of_tokens, n, LONGEST)


def make_model(encoding: str) -> LanguageModel:
    """Return a decoder of two layers with these positions."""
    layer = MultiHeadAttention(2, **ENCODINGS[encoding])
    return base.decoder(2, layer, FEATURES, 2 * FEATURES, TOKENS + 2)


def score(model: LanguageModel, task: str, params: Params) -> jax.Array:
    """Return the shares of exact outputs and of right tokens, [2, LENGTHS]."""

    def at(n: jax.Array) -> jax.Array:
        # All lengths have room for the longest, so that one program serves them.
        batch = make(task, jax.random.key(n), jnp.full((TESTED,), n), max(LENGTHS))
        logits: Any = model.apply({"params": params}, batch["tokens"])
        right, weight = logits.argmax(-1) == batch["labels"], batch["weight"]
        return jnp.stack([(right | ~weight).all(-1).mean(), right.mean(where=weight)])

    return jax.lax.map(at, jnp.asarray(LENGTHS)).T


def main() -> None:
    """Train all models, draw their exact outputs by length, and print them."""
    flags = base.read_flags(__doc__, steps=1000, seeds=3)
    labels = "length of the input (tokens)", "exact outputs (%)"
    titles = {f"{task}: trained on up to {LONGEST} tokens": labels for task in TASKS}
    figure, panels = make_panels(titles, width=4.4, height=3.4)
    optimizer = base.make_adam(flags.steps, 5e-3)
    for task, axes in zip(TASKS, panels, strict=True):
        for encoding, color in zip(ENCODINGS, COLORS, strict=False):
            model, get = make_model(encoding), functools.partial(draw, task)
            trained = base.train_model(model, get, flags, optimizer, points=2)
            scores = jax.jit(jax.vmap(functools.partial(score, model, task)))
            exact, right = np.moveaxis(np.asarray(scores(trained.params)), 0, -1)
            draw_band(axes, LENGTHS, 100 * exact, encoding, color)
            for i in map(LENGTHS.index, (8, 10, 16, 32)):
                spreads = " | ".join(map(spread, (exact[i], right[i])))
                print(f"| {task} | {encoding} | {LENGTHS[i]} | {spreads} |", flush=True)
        axes.axvspan(LENGTHS[0], LONGEST, color="0.92", zorder=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks((2, 4, 8, 16, 32), ("2", "4", "8", "16", "32"))
        axes.set_ylim(-3, 103)
    save(figure, flags.figure)


if __name__ == "__main__":
    main()
