"""Do induction heads come with learning in context, and does the model need them?

    python -m experiments.studies.induction --figure=docs/_static/studies/induction.png

Half of the sequences are of a bigram language, half repeat their first 4 to 12 tokens. The score
of a head is its weight on the token after the earlier copy, in random orders that are repeated.
docs/studies/induction.md has the answer. Source: Olsson et al., arXiv 2209.11895.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from experiments.studies import base, heads
from experiments.studies.figures import COLORS, draw_band, make_panels, save, spread
from experiments.tasks.task import Batch, Metrics, Params
from flax_mha import LanguageModel, edits

TOKENS, LENGTH, BATCH = 16, 32, 64
HELD_OUT, REPEATED = 256, 32  # sequences, and repeated ones
PERIODS, THRESHOLD = (4, 13), 0.3  # the tokens that repeat; the least score of an induction head
NUMBERS = range(1, 5)  # of removed heads
KINDS = {"early": "tokens 2 to 5", "late": "last 8 tokens", "copies": "repeats"}


def draw_sequences(key: jax.Array, rows: int = BATCH) -> Batch:
    """Return a batch of sequences of the language, every second with repeats."""
    matrix = jax.nn.softmax(2 * jax.random.normal(jax.random.key(0), (TOKENS, TOKENS)))
    keys = jax.random.split(key, 4)
    first = jax.random.randint(keys[0], (rows,), 0, TOKENS)
    draws = jax.random.uniform(keys[1], (LENGTH, rows))
    tokens = heads.walk(jnp.cumsum(matrix, -1)[None, :, :-1], first, draws)
    period = jax.random.randint(keys[2], (rows, 1), *PERIODS)
    places = jnp.arange(LENGTH + 1)[None] % period
    orders = jnp.argsort(jax.random.uniform(keys[3], (rows, TOKENS)), -1)
    repeats = jnp.take_along_axis(orders, places, 1)
    return base.label_next(jnp.where(jnp.arange(rows)[:, None] % 2 == 0, tokens, repeats))


def repeat_orders(key: jax.Array) -> Batch:
    """Return a batch of random orders of all tokens, each twice and its first again."""
    orders = jnp.argsort(jax.random.uniform(key, (REPEATED, TOKENS)), -1)
    return base.label_next(jnp.tile(orders, 3)[:, : LENGTH + 1])


def measure(model: LanguageModel, params: Params, key: jax.Array, edited: Any = None) -> Metrics:
    """Return the losses in nats, and scores [layers, heads], with edited variables if given."""
    variables = edited or {"params": params}
    held, copies = draw_sequences(key, HELD_OUT), repeat_orders(key)

    def score(batch: Batch, places: slice) -> jax.Array:
        logits = model.apply(variables, batch["tokens"])
        return base.score(*jax.tree.map(lambda x: x[:, places], (logits, batch)))

    first, last, again = slice(4), slice(-8, None), slice(LENGTH // 2, None)
    losses = score(held, first), score(held, last), score(copies, again)
    found = dict(zip(KINDS, losses, strict=True))
    return found | heads.score_heads(model, variables, copies["tokens"])


def remove_heads(model: LanguageModel, params: Params, key: jax.Array) -> Metrics:
    """Return the rise of each loss without the heads of the highest and the lowest scores.

    It is [2, numbers]. The output of a removed head is its mean over held-out sequences.
    """
    whole = measure(model, params, key)
    means = heads.mean_outputs(model, params, draw_sequences(key, HELD_OUT)["tokens"])

    def run(keep: jax.Array) -> Metrics:
        found = measure(model, params, key, heads.replace(params, "attention_z", keep, means))
        return {kind: found[kind] - whole[kind] for kind in KINDS}

    scores, number = whole["induction"], jnp.asarray(NUMBERS)[:, None, None]
    rank = jnp.argsort(jnp.argsort(scores, None)).reshape(scores.shape)
    keep = jnp.concatenate([rank < scores.size - number, rank >= number]).astype(jnp.float32)
    rise = edits.sweep(run, keep[:, :, None, :, None])
    return jax.tree.map(lambda x: x.reshape(2, -1), rise)


def main() -> None:
    """Train, remove heads, draw the figure and print the numbers."""
    flags = base.read_flags(__doc__, steps=450, seeds=3)
    figure, axes = make_panels({
        "Prefix matching": ("training step", "best score in the last layer"),
        "Learning in context": ("training step", "loss, late − early tokens [nats]"),
        "Removal": ("removed heads", "rise of the loss [nats]"),
    })  # fmt: skip
    depths = heads.train_depths(TOKENS, draw_sequences, measure, flags, 1e-2)
    for (name, trained), color in zip(depths, COLORS, strict=False):
        params, steps, found = trained
        best, in_context = found["induction"][:, :, -1].max(-1), found["late"] - found["early"]
        losses = [f"{KINDS[kind]} {spread(found[kind][-1])}" for kind in KINDS]
        print(f"{name}: best score {spread(best[-1])}, losses: {', '.join(losses)}")
        draw_band(axes[0], steps, best, name, color)
        draw_band(axes[1], steps, in_context, name, color)
    remove = functools.partial(remove_heads, heads.attention_only(2, TOKENS), key=jax.random.key(0))
    removed = jax.jit(jax.vmap(remove))(params)
    print("induction heads:", (found["induction"][-1] >= THRESHOLD).sum((1, 2)))
    for i, name in enumerate(("highest scores", "lowest scores")):
        for kind, style in (("early", "--"), ("copies", "-")):
            rise, label = removed[kind][:, i], f"{name}, {KINDS[kind]}"
            print(f"without 1 to 4 {label}:", *map(spread, rise.T))
            draw_band(axes[2], NUMBERS, rise.T, label, COLORS[i + 2], style)
    save(figure, flags.figure)


if __name__ == "__main__":
    main()
