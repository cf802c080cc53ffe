"""Do transformers learn Markov chains in context, and which heads do it?

    python -m experiments.studies.markov --figure=docs/_static/studies/markov.png

Each sequence has its own chain, with matrix rows from a uniform Dirichlet distribution. It takes
two and a half minutes of processor time. docs/studies/markov.md has the answer. Source: Edelman et
al., "The Evolution of Statistical Induction Heads", 2024 (arXiv:2402.11004).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.studies import base, heads
from experiments.studies.figures import COLORS, draw_band, draw_bars, make_panels, save, spread
from experiments.tasks.task import Batch, Metrics, Params
from flax_mha import LanguageModel, analysis, edits

STATES, LENGTH, HEADS, BATCH = 3, 64, 4, 32
HELD_OUT = 256  # chains of a measurement
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


def ideal_weights(tokens: jax.Array) -> jax.Array:
    """Return weights [2, rows, 1, T, T]: an ideal previous-token head, and a matching head.

    The second attends evenly to the tokens after each earlier copy of the query's token. A query
    without such keys attends to itself.
    """
    pairs, T = analysis.token_pairs(tokens), tokens.shape[-1]
    sees = jnp.stack([pairs[kind].dense(T, batch=(len(tokens),)) for kind in KINDS])
    itself = jnp.eye(T, dtype=bool)[None, None, None]
    sees = jnp.where(sees.any(-1, keepdims=True), sees, itself).astype(jnp.float32)
    return sees / sees.sum(-1, keepdims=True)


def measure(model: LanguageModel, params: Params, key: jax.Array) -> Metrics:
    """Return the loss on held-out chains, and the scores of each head [layers, heads]."""
    batch = draw_chains(key, HELD_OUT)
    loss = base.score(model.apply({"params": params}, batch["tokens"]), batch)
    return {"tested": loss, **heads.score_heads(model, params, batch["tokens"])}


def change_heads(model: LanguageModel, params: Params, key: jax.Array) -> Metrics:
    """Return the rise of the loss by changes of the heads of a trained model of 2 layers.

    In `removed` [2, heads], by falling score in each layer, the output of one head is its mean over
    chains; in `only` so are all but the best previous-token head and the best matching head; in
    `ideal` [2] the weights of the first of these, or of both, are the ideal ones.
    """
    batch, found = draw_chains(key, HELD_OUT), measure(model, params, key)
    means = heads.mean_outputs(model, params, batch["tokens"])

    def test(name: str, value: jax.Array, keep: jax.Array) -> jax.Array:
        variables = heads.edit_layers(params, name, keep, (1 - keep) * value)
        return base.score(model.apply(variables, batch["tokens"]), batch) - found["tested"]

    score = jnp.stack([found[kind][i] for i, kind in enumerate(KINDS)])
    ranks = jnp.argsort(jnp.argsort(-score, -1), -1)  # [2, heads]
    which = (ranks + jnp.asarray([[0], [HEADS]]))[None] == jnp.arange(2 * HEADS)[:, None, None]
    best = (ranks == 0).astype(jnp.float32)
    keep = jnp.concatenate([1 - which.astype(jnp.float32), best[None]])
    removed = edits.sweep(functools.partial(test, "attention_z", means), keep[:, :, None, :, None])
    ideal = ideal_weights(batch["tokens"])
    others = 1 - jnp.stack([best.at[1].set(0), best])[:, :, None, :, None, None]
    replaced = edits.sweep(functools.partial(test, "attention_weights", ideal), others)
    return {"removed": removed[:-1].reshape(2, HEADS), "only": removed[-1], "ideal": replaced}


def main() -> None:
    """Train, change the heads, draw the figure and print the numbers."""
    flags = base.read_flags(__doc__, steps=450, seeds=3)
    figure, axes = make_panels({
        "Loss": ("training step", "loss on held-out chains [nats]"),
        "Heads of 2 layers": ("training step", "score of the best head"),
        "Without one of the heads": ("rank of the head by its score", "rise of the loss [nats]"),
    })  # fmt: skip
    key, optimizer = jax.random.key(0), base.make_adam(flags.steps, 3e-3, warmup=0.05)
    for layers, name in enumerate(("1 layer", "2 layers"), 1):
        model = heads.attention_only(layers, HEADS, 32, STATES)
        probe = functools.partial(measure, model)
        params, steps, found = base.train_model(model, draw_chains, flags, optimizer, probe=probe)
        print(f"{name}: {spread(found['tested'][-1])} nats")
        draw_band(axes[0], steps, found["tested"], name, COLORS[layers - 1])
    counts = score_counts(draw_chains(key, HELD_OUT))
    for (name, losses), style in zip(counts.items(), ("--", ":"), strict=True):
        print(f"{name} counts: {losses.mean():.3f} nats")
        axes[0].axhline(float(losses.mean()), color="black", ls=style, lw=1, label=f"{name} counts")
    changed = jax.jit(jax.vmap(functools.partial(change_heads, model, key=key)))(params)
    for i, (kind, name) in enumerate(KINDS.items()):
        best, rise, color = found[kind][:, :, i].max(-1), changed["removed"][:, i], i + 2
        print(f"{name}: {spread(best[-1])}, by rank:", *map(spread, rise.T))
        draw_band(axes[1], steps, best, name, COLORS[color])
        draw_bars(axes[2], np.arange(HEADS) + i * (HEADS + 1), rise, name, COLORS[color])
    print("only these two:", spread(changed["only"]))
    print("ideal weights in layer 1, in both:", *map(spread, changed["ideal"].T))
    axes[1].set_ylim(0, 1.02)
    axes[2].set_xticks([0, 1, 2, 3, 5, 6, 7, 8], [*"12341234"])
    save(figure, flags.figure)


if __name__ == "__main__":
    main()
