"""Do transformers learn Markov chains in context, and which heads do it?

    python -m experiments.studies.markov --figure=docs/_static/studies/markov.png

Each sequence has its own chain, with matrix rows from a uniform Dirichlet distribution.
docs/studies/markov.md has the answer. Source: Edelman et al., arXiv 2402.11004.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.studies import base, heads
from experiments.studies.figures import COLORS, draw_band, draw_bars, make_panels, save, spread
from experiments.tasks.task import Batch, Metrics, Params
from flax_mha import LanguageModel, edits

STATES, LENGTH, HEADS = 3, 64, heads.HEADS
BATCH, HELD_OUT = 32, 256  # chains of a step, and of a measurement
KINDS = {"previous": "previous token, layer 1", "induction": "matching, layer 2"}


def draw_chains(key: jax.Array, rows: int = BATCH) -> Batch:
    """Return a batch of sequences of Markov chains, each with its own matrix."""
    matrix_key, first_key, key = jax.random.split(key, 3)
    shares = jax.random.exponential(matrix_key, (rows, STATES, STATES))  # Dirichlet, unnormalized
    bounds = jnp.cumsum(shares / shares.sum(-1, keepdims=True), -1)[..., :-1]
    first = jax.random.randint(first_key, (rows,), 0, STATES)
    return base.label_next(heads.walk(bounds, first, jax.random.uniform(key, (LENGTH, rows))))


def score_counts(batch: Batch) -> dict[str, jax.Array]:
    """Return the losses of predictors that count, in nats [rows, T], by name.

        unigram: (n(y) + 1) / (t + states)         bigram: (n(x, y) + 1) / (n(x) + states)

    Here y is the next token, x the current one, and n counts the t tokens, or the pairs, so far.
    The bigram predictor is Bayes' for uniform Dirichlet rows.
    """
    now, new = (jax.nn.one_hot(batch[name], STATES) for name in ("tokens", "labels"))
    pairs = now[..., :, None] * new[..., None, :]
    earlier = jnp.einsum("btx,btxy->bty", now, jnp.cumsum(pairs, 1) - pairs)
    counts = {"unigram": jnp.cumsum(now, 1) + 1, "bigram": earlier + 1}
    return {name: -jnp.log((n * new).sum(-1) / n.sum(-1)) for name, n in counts.items()}


def measure(model: LanguageModel, params: Params, key: jax.Array) -> Metrics:
    """Return the loss on held-out chains, and the scores of each head [layers, heads]."""
    batch, variables = draw_chains(key, HELD_OUT), {"params": params}
    loss = base.score(model.apply(variables, batch["tokens"]), batch)
    return {"tested": loss, **heads.score_heads(model, variables, batch["tokens"])}


def change_heads(model: LanguageModel, params: Params, key: jax.Array) -> Metrics:
    """Return the rise of the loss by changes of the heads of a trained model of 2 layers.

    In `removed` [2, heads], by falling score, the output of one head is its mean over chains; in
    `only` that of all but the best head of each layer; in `ideal` [2] the weights of the first of
    these, or of both, are the ideal ones.
    """
    batch, found = draw_chains(key, HELD_OUT), measure(model, params, key)
    means = heads.mean_outputs(model, params, batch["tokens"])
    ideal = heads.ideal_weights(batch["tokens"])

    def test(keep: Any, name: str = "attention_z", value: Any = means, axes: Any = (1, 3)) -> Any:
        variables = heads.replace(params, name, jnp.expand_dims(keep, axes), value)
        return base.score(model.apply(variables, batch["tokens"]), batch) - found["tested"]

    order = jnp.argsort(-jnp.stack([found[kind][i] for i, kind in enumerate(KINDS)]), -1)
    best = jax.nn.one_hot(order[:, 0], HEADS)
    rise = edits.sweep(test, 1 - jnp.eye(2 * HEADS).reshape(-1, 2, HEADS)).reshape(2, HEADS)
    pair = (1 - best.at[1].set(0), 1 - best)
    replaced = jnp.stack([test(x, "attention_weights", ideal, (1, 3, 4)) for x in pair])
    return {"removed": jnp.take_along_axis(rise, order, 1), "only": test(best), "ideal": replaced}


def main() -> None:
    """Train, change the heads, draw the figure and print the numbers."""
    flags = base.read_flags(__doc__, steps=450, seeds=3)
    figure, axes = make_panels({
        "Loss": ("training step", "loss on held-out chains [nats]"),
        "Heads of 2 layers": ("training step", "score of the best head"),
        "Without one of the heads": ("rank of the head by its score", "rise of the loss [nats]"),
    })  # fmt: skip
    key, depths = jax.random.key(0), heads.train_depths(STATES, draw_chains, measure, flags, 3e-3)
    for (depth, trained), color in zip(depths, COLORS, strict=False):
        params, steps, found = trained
        print(f"{depth}: {spread(found['tested'][-1])} nats")
        draw_band(axes[0], steps, found["tested"], depth, color)
    counts = score_counts(draw_chains(key, HELD_OUT))
    for (name, losses), style in zip(counts.items(), ("--", ":"), strict=True):
        print(f"{name} counts: {losses.mean():.3f} nats")
        axes[0].axhline(float(losses.mean()), color="black", ls=style, lw=1, label=f"{name} counts")
    change = functools.partial(change_heads, heads.attention_only(2, STATES), key=key)
    changed = jax.jit(jax.vmap(change))(params)
    for i, (kind, name) in enumerate(KINDS.items()):
        best, rise, color = found[kind][:, :, i].max(-1), changed["removed"][:, i], COLORS[i + 2]
        print(f"{name}: {spread(best[-1])}, by rank:", *map(spread, rise.T))
        draw_band(axes[1], steps, best, name, color)
        draw_bars(axes[2], np.arange(HEADS) + i * (HEADS + 1), rise, name, color)
    print("only these two:", spread(changed["only"]), "ideal:", *map(spread, changed["ideal"].T))
    axes[2].set_xticks([0, 1, 2, 3, 5, 6, 7, 8], [*"12341234"])
    save(figure, flags.figure)


if __name__ == "__main__":
    main()
