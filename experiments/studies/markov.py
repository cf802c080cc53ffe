"""Markov chains: do transformers learn them in context, and which heads do it?

    python -m experiments.studies.markov --figure=docs/_static/studies/markov.png

Each sequence has its own chain, with matrix rows from a uniform Dirichlet distribution. As in the
source, two layers predict by the counts of tokens, and from step 120 to 240 learn to count pairs:
0.930 nats (0.930 to 0.930 in 3 seeds). The best possible is 0.911, counts of tokens give 1.015, and
one layer 1.005. Exact weights in place of the best previous-token head cost 0.003 nats. But it is
no circuit of two heads: two match in layer 2, and without all others the loss rises by 0.177.
It takes two and a half minutes of processor time.

Source: Edelman et al., "The Evolution of Statistical Induction Heads", 2024 (arXiv:2402.11004).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.studies import base
from experiments.tasks.task import Batch, Metrics, Params
from flax_mha import analysis, edits, scores

STATES, LENGTH, HEADS, BATCH = 3, 64, 4, 32
HELD_OUT = 256  # chains of a measurement
KINDS = {"previous": "previous token, layer 1", "induction": "matching, layer 2"}


def draw_chains(key: jax.Array, rows: int, length: int) -> jax.Array:
    """Return sequences of Markov chains, int [rows, length], each with its own matrix."""
    matrix_key, first_key, key = jax.random.split(key, 3)
    shares = jax.random.exponential(matrix_key, (rows, STATES, STATES))  # Dirichlet, unnormalized
    bounds = jnp.cumsum(shares / shares.sum(-1, keepdims=True), -1)[..., :-1]
    first = jax.random.randint(first_key, (rows,), 0, STATES)

    def step(state: jax.Array, draw: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = jnp.sum(draw[:, None] > bounds[jnp.arange(rows), state], -1)
        return new, new

    _, others = jax.lax.scan(step, first, jax.random.uniform(key, (length - 1, rows)))
    return jnp.concatenate([first[None], others]).T


def draw_batch(key: jax.Array, rows: int = BATCH) -> Batch:
    """Return a batch of chains."""
    return base.label_next(draw_chains(key, rows, LENGTH + 1))


def score_counts(tokens: jax.Array) -> dict[str, jax.Array]:
    """Return the losses of predictors that count, in nats [rows, T − 1], by name.

        unigram: (n(y) + 1) / (t + states)         bigram: (n(x, y) + 1) / (n(x) + states)

    Here y is the next token, x the current one, and n counts the t tokens, or the pairs, so far.
    The bigram predictor is Bayes' for uniform Dirichlet rows.
    """
    one_hot = jax.nn.one_hot(tokens, STATES)
    now, new = one_hot[:, :-1], one_hot[:, 1:]
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


def measure(task: base.Labelled, params: Params, key: jax.Array) -> Metrics:
    """Return the loss on held-out chains, and the scores of each head [layers, heads]."""
    batch = draw_batch(key, HELD_OUT)
    loss, _ = task.loss(params, batch, key)
    return {"tested": loss, **base.score_heads(task.model, params, batch["tokens"])}


def change_heads(task: base.Labelled, params: Params, key: jax.Array) -> Metrics:
    """Return the rise of the loss by changes of the heads of a trained model of 2 layers.

    They are `removed` [2, heads], by falling score in each layer: the output of one head is its
    mean over chains; `alone`: so are all but the best previous-token head and the best matching
    head; `ideal` [2]: the weights of the first of these, or of both, are the ideal ones.
    """
    batch = draw_batch(key, HELD_OUT)
    found, ideal = measure(task, params, key), ideal_weights(batch["tokens"])
    means = base.mean_outputs(task.model, params, batch["tokens"])

    def test(name: str, value: jax.Array, keep: jax.Array) -> jax.Array:
        variables = base.edit_layers(params, name, keep, (1 - keep) * value)
        logits = task.model.apply(variables, batch["tokens"])
        return task.scores(logits, batch)[0] - found["tested"]

    score = jnp.stack([found[kind][i] for i, kind in enumerate(KINDS)])
    ranks = jnp.argsort(jnp.argsort(-score, -1), -1)  # [2, heads]
    numbers = ranks + jnp.asarray([[0], [HEADS]])
    which = numbers[None] == jnp.arange(2 * HEADS)[:, None, None]
    best = (ranks == 0).astype(jnp.float32)
    keep = jnp.concatenate([1 - which.astype(jnp.float32), best[None]])
    removed = edits.sweep(functools.partial(test, "attention_z", means), keep[:, :, None, :, None])
    others = 1 - jnp.stack([best.at[1].set(0), best])[:, :, None, :, None, None]
    replaced = edits.sweep(functools.partial(test, "attention_weights", ideal), others)
    return {"removed": removed[:-1].reshape(2, HEADS), "alone": removed[-1], "ideal": replaced}


def main() -> None:
    """Train, change the heads, print the numbers and draw the figure."""
    flags = base.read_flags(__doc__, steps=450, seeds=3)
    figure, axes = base.make_panels("Loss", "Heads of 2 layers", "Without one of the heads")
    key = jax.random.key(0)
    for name, layers, color in (("1 layer", 1, 0), ("2 layers", 2, 1)):
        model = base.attention_only(layers, HEADS, 32, STATES, scores=(scores.Relative(),))
        task = base.Labelled(model, LENGTH)
        probe = functools.partial(measure, task)
        trained = base.train_model(
            task, draw_batch, flags, probe=probe, learning_rate=3e-3, warmup=0.05
        )
        steps, found = trained.steps, trained.found
        print(f"{name}: {base.spread(found['tested'][-1])} nats, {trained.seconds:.0f} s")
        base.draw_band(axes[0], steps, found["tested"], name, base.COLORS[color])
    for name, losses in score_counts(draw_chains(key, HELD_OUT, LENGTH + 1)).items():
        loss, style = float(losses.mean()), {"unigram": "--", "bigram": ":"}[name]
        print(f"{name} counts: {loss:.3f} nats")
        axes[0].axhline(loss, color="black", linestyle=style, linewidth=1, label=f"{name} counts")
    change = jax.jit(jax.vmap(functools.partial(change_heads, task, key=key)))
    changed = jax.device_get(change(trained.state.params))
    for i, (kind, name) in enumerate(KINDS.items()):
        best, rise, color = found[kind][:, :, i].max(-1), changed["removed"][:, i], i + 2
        print(f"{name}: {base.spread(best[-1])}, by rank:", *map(base.spread, rise.T))
        base.draw_band(axes[1], steps, best, name, base.COLORS[color])
        x = np.arange(HEADS) + i * (HEADS + 1)
        base.draw_bars(axes[2], x, rise, name, base.COLORS[color])
    print("these two alone:", base.spread(changed["alone"]))
    print("ideal weights in layer 1, in both:", *map(base.spread, changed["ideal"].T))
    axes[0].set(xlabel="training step", ylabel="loss on held-out chains [nats]")
    axes[1].set(xlabel="training step", ylabel="score of the best head", ylim=(0, 1.02))
    axes[2].set(xlabel="rank of the head by its score", ylabel="rise of the loss [nats]")
    axes[2].set_xticks([0, 1, 2, 3, 5, 6, 7, 8], [*"12341234"])
    for each in axes:
        each.legend(fontsize=8)
    base.save(figure, flags.figure)


if __name__ == "__main__":
    main()
