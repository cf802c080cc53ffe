"""Induction heads: do they come with learning in context, and does the model need them?

    python -m experiments.studies.induction --figure=docs/_static/studies/induction.png

Half of the sequences are of a bigram language, half repeat their first 4 to 12 tokens. The score
of a head is its weight on the token after the earlier copy, in random orders that are repeated.
With two layers, the score and the learning in context rise together, as in the source. All four
heads of layer 2 are then induction heads. Without them repeats cost 3.15 nats more (3.07 to 3.23
in 3 seeds), other tokens 0.04. Without one of the other heads repeats cost 1.75 nats more, as
layer 1 feeds the induction heads. But that hurts all tokens. It takes two minutes of processor
time.

Source: Olsson et al., "In-context Learning and Induction Heads", 2022 (arXiv:2209.11895).
"""

import functools

import jax
import jax.numpy as jnp

from experiments.studies import base
from experiments.tasks.task import Batch, Metrics, Params
from flax_mha import edits, scores

TOKENS, LENGTH, HEADS, FEATURES, BATCH = 16, 32, 4, 32, 64
HELD_OUT, REPEATED, DRAWS = 256, 32, 16  # sequences, repeated ones, random sets of heads
PERIODS, THRESHOLD = (4, 13), 0.3  # the tokens that repeat; the least score of an induction head
NUMBERS = (1, 2, 3, 4)  # of removed heads
PLACES = {"early": slice(0, 4), "late": slice(-8, None)}  # in a sequence
KINDS = {"early": "tokens 2 to 5", "late": "last 8 tokens", "copies": "repeats"}


def draw_sequences(key: jax.Array, rows: int) -> jax.Array:
    """Return sequences of the language, int [rows, length + 1], some with repeats."""
    T = LENGTH + 1
    matrix = jax.nn.softmax(2 * jax.random.normal(jax.random.key(0), (TOKENS, TOKENS)))
    bounds = jnp.cumsum(matrix, -1)[:, :-1]
    keys = jax.random.split(key, 4)

    def step(token: jax.Array, draw: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = jnp.sum(draw[:, None] > bounds[token], -1)
        return new, new

    first = jax.random.randint(keys[0], (rows,), 0, TOKENS)
    _, others = jax.lax.scan(step, first, jax.random.uniform(keys[1], (T - 1, rows)))
    tokens = jnp.concatenate([first[None], others]).T
    period = jax.random.randint(keys[2], (rows, 1), *PERIODS)
    repeats = jnp.take_along_axis(draw_orders(keys[3], rows), jnp.arange(T)[None] % period, 1)
    return jnp.where(jnp.arange(rows)[:, None] % 2 == 0, tokens, repeats)


def draw_orders(key: jax.Array, rows: int) -> jax.Array:
    """Return random orders of all tokens, int [rows, tokens]."""
    return jnp.argsort(jax.random.uniform(key, (rows, TOKENS)), -1)


def draw_batch(key: jax.Array, rows: int = BATCH) -> Batch:
    """Return a batch of sequences."""
    return base.label_next(draw_sequences(key, rows))


def repeat_orders(key: jax.Array) -> jax.Array:
    """Return random orders of all tokens, each twice and its first again, [rows, length + 1]."""
    return jnp.tile(draw_orders(key, REPEATED), 3)[:, : LENGTH + 1]


def find_losses(task: base.Labelled, variables: Params, key: jax.Array) -> Metrics:
    """Return the losses of early and of late tokens, and of repeated random tokens, in nats."""
    held, copies = draw_batch(key, HELD_OUT), base.label_next(repeat_orders(key))

    def score(batch: Batch, logits: jax.Array, places: slice) -> jax.Array:
        weight = jnp.zeros_like(batch["weight"]).at[:, places].set(1)
        return task.scores(logits, {**batch, "weight": weight})[0]

    logits, on_copies = (task.model.apply(variables, x["tokens"]) for x in (held, copies))
    found = {name: score(held, logits, places) for name, places in PLACES.items()}
    return found | {"copies": score(copies, on_copies, slice(LENGTH // 2, None))}


def measure(task: base.Labelled, params: Params, key: jax.Array) -> Metrics:
    """Return the losses, and the scores of each head [layers, heads]."""
    found = base.score_heads(task.model, params, repeat_orders(key)[:, :-1])
    return {**find_losses(task, {"params": params}, key), **found}


def choose_heads(score: jax.Array, number: int, key: jax.Array) -> jax.Array:
    """Return sets of heads [1 + draws, layers, heads], bools: the best, and random other ones.

    All have a number of heads, or fewer: the first of induction heads, the others of other heads.
    """
    is_induction = score >= THRESHOLD
    best = (score >= jnp.sort(score.reshape(-1))[-number]) & is_induction
    noise = jnp.where(is_induction[None], 2, jax.random.uniform(key, (DRAWS, *score.shape)))
    bound = jnp.sort(noise.reshape(DRAWS, -1), -1)[:, number - 1, None, None]
    return jnp.concatenate([best[None], (noise <= bound) & ~is_induction[None]])


def remove_heads(task: base.Labelled, params: Params, key: jax.Array) -> Metrics:
    """Return the number of induction heads, and the rise of each loss [numbers, 1 + draws].

    The output of a removed head is its mean over held-out sequences.
    """
    whole = measure(task, params, key)
    means = base.mean_outputs(task.model, params, draw_sequences(key, HELD_OUT)[:, :-1])

    def run(keep: jax.Array) -> Metrics:
        variables = base.edit_layers(params, "attention_z", keep, (1 - keep) * means)
        return {name: x - whole[name] for name, x in find_losses(task, variables, key).items()}

    sets = jnp.stack([choose_heads(whole["induction"], number, key) for number in NUMBERS])
    rise = edits.sweep(run, 1 - sets.reshape(-1, 2, 1, HEADS, 1).astype(jnp.float32))
    rise = jax.tree.map(lambda x: x.reshape(sets.shape[:2]), rise)
    return {"count": jnp.sum(whole["induction"] >= THRESHOLD), **rise}


def main() -> None:
    """Train, remove heads, print the numbers and draw the figure."""
    flags = base.read_flags(__doc__, steps=450, seeds=3)
    figure, axes = base.make_panels("Prefix matching", "Learning in context", "Removal", width=3.5)
    for name, layers, color in (("1 layer", 1, 0), ("2 layers", 2, 1)):
        model = base.attention_only(layers, HEADS, FEATURES, TOKENS, scores=(scores.Relative(),))
        task = base.Labelled(model, LENGTH)
        probe = functools.partial(measure, task)
        trained = base.train_model(
            task, draw_batch, flags, probe=probe, learning_rate=1e-2, warmup=0.05
        )
        steps, found = trained.steps, trained.found
        best, in_context = found["induction"][:, :, -1].max(-1), found["late"] - found["early"]
        print(f"{name}: {trained.seconds:.0f} s, best score {base.spread(best[-1])}")
        for kind, tokens in KINDS.items():
            print(f"  loss, {tokens}: {base.spread(found[kind][-1])}")
        base.draw_band(axes[0], steps, best, name, base.COLORS[color])
        base.draw_band(axes[1], steps, in_context, name, base.COLORS[color])
    remove = jax.jit(jax.vmap(functools.partial(remove_heads, task, key=jax.random.key(0))))
    removed = jax.device_get(remove(trained.state.params))
    print("induction heads:", removed["count"])
    for i, name in enumerate(("induction heads", "other heads")):
        for kind, tokens in KINDS.items():
            rise = removed[kind][:, :, 1:].mean(-1) if i else removed[kind][:, :, 0]
            print(f"without 1 to 4 {name}, {tokens}:", *map(base.spread, rise.T))
            label, style = f"{name}, {tokens}", "-" if kind == "copies" else "--"
            if kind != "late":
                base.draw_band(axes[2], NUMBERS, rise.T, label, base.COLORS[i + 2], style)
    axes[0].set(xlabel="training step", ylabel="best score in the last layer", ylim=(0, 1.02))
    axes[1].set(xlabel="training step", ylabel="loss, late − early tokens [nats]")
    axes[2].set(xlabel="removed heads", ylabel="rise of the loss [nats]", ylim=(-0.2, 5.4))
    axes[2].set_xticks(NUMBERS)
    for each in axes:
        each.legend(fontsize=8)
    base.save(figure, flags.figure)


if __name__ == "__main__":
    main()
