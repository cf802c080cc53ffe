"""Do induction heads appear when a model starts to learn in context, and does it need them?

The sequences are of a bigram language, and half of them repeat their first 8 to 31 tokens. The score of a head is its weight on the token after the earlier copy of the current one,
in random tokens that are repeated once (prefix matching).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes

from experiments.studies import base
from experiments.tasks.task import Batch, Metrics, Params
from experiments.trainer.loop import one_model
from flax_mha import edits, scores

TOKENS, LENGTH, HEADS, FEATURES, BATCH = 32, 64, 4, 32, 32
HELD_OUT, REPEATED, DRAWS = 256, 32, 16  # sequences, repeated ones, random sets of heads
PERIODS = (8, 32)  # the tokens that repeat: from the least to below the most
THRESHOLD = 0.3  # the least score of an induction head
PLACES = {"early": slice(4, 12), "late": slice(-8, None)}  # in a sequence
KINDS = {"early": "tokens 6 to 13", "late": "last 8 tokens", "copies": "repeated random"}


def draw_sequences(key: jax.Array, rows: int) -> jax.Array:
    """Return sequences of the language, int [rows, length + 1], some with repeats."""
    T = LENGTH + 1
    matrix = jax.nn.softmax(1.5 * jax.random.normal(jax.random.key(0), (TOKENS, TOKENS)))
    bounds = jnp.cumsum(matrix, -1)[:, :-1]
    keys = jax.random.split(key, 4)

    def step(token: jax.Array, draw: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = jnp.sum(draw[:, None] > bounds[token], -1)
        return new, new

    first = jax.random.randint(keys[0], (rows,), 0, TOKENS)
    _, others = jax.lax.scan(step, first, jax.random.uniform(keys[1], (T - 1, rows)))
    tokens = jnp.concatenate([first[None], others]).T
    period = jax.random.randint(keys[2], (rows, 1), *PERIODS)
    period = jnp.where(jax.random.bernoulli(keys[3], 0.5, (rows, 1)), period, T)
    return jnp.take_along_axis(tokens, jnp.arange(T)[None] % period, 1)


def draw_batch(key: jax.Array) -> Batch:
    """Return a batch of sequences for training."""
    return base.label_next(draw_sequences(key, BATCH))


def repeat_random(key: jax.Array) -> jax.Array:
    """Return random orders of all tokens, twice and the first again, int [rows, length + 1]."""
    keys = jax.random.split(key, REPEATED)
    orders = jax.vmap(lambda key: jax.random.permutation(key, TOKENS))(keys)
    return jnp.tile(orders, 3)[:, : LENGTH + 1]


def find_losses(task: base.Labelled, variables: Params, key: jax.Array) -> Metrics:
    """Return the losses of early and of late tokens, and of repeated random tokens, in nats."""
    held, copies = (base.label_next(f) for f in (draw_sequences(key, HELD_OUT), repeat_random(key)))

    def score(batch: Batch, logits: jax.Array, places: slice) -> jax.Array:
        weight = jnp.zeros_like(batch["weight"]).at[:, places].set(1)
        return task.scores(logits, {**batch, "weight": weight})[0]

    logits = task.model.apply(variables, held["tokens"])
    found = {name: score(held, logits, places) for name, places in PLACES.items()}
    on_copies = task.model.apply(variables, copies["tokens"])
    return found | {"copies": score(copies, on_copies, slice(LENGTH // 2, None))}


def measure(task: base.Labelled, params: Params, key: jax.Array) -> Metrics:
    """Return the losses, and the scores of each head [layers, heads]."""
    found = base.score_heads(task.model, params, repeat_random(key)[:, :-1])
    return {**find_losses(task, {"params": params}, key), **found}


def choose_heads(score: jax.Array, key: jax.Array) -> jax.Array:
    """Return sets of heads [1 + draws, layers, heads], bools: the induction heads, and random ones.

    Each random set has as many heads as the first, or all others if these are fewer.
    """
    is_induction = score >= THRESHOLD
    noise = jnp.where(is_induction[None], 2, jax.random.uniform(key, (DRAWS, *score.shape)))
    ranks = jnp.argsort(jnp.argsort(noise.reshape(DRAWS, -1), -1), -1).reshape(noise.shape)
    others = (ranks < is_induction.sum()) & ~is_induction[None]
    return jnp.concatenate([is_induction[None], others])


def remove_heads(task: base.Labelled, params: Params, key: jax.Array) -> Metrics:
    """Return the number of induction heads, and the rise of each loss [1 + draws] without a set.

    The output of a removed head is its mean over held-out sequences.
    """
    whole = measure(task, params, key)
    means = base.mean_outputs(task.model, params, draw_sequences(key, HELD_OUT)[:, :-1])

    def run(keep: jax.Array, params: Params) -> Metrics:
        variables = base.edit_layers(params, "attention_z", keep, (1 - keep) * means)
        found = find_losses(task, variables, key)
        return {name: loss - whole[name] for name, loss in found.items()}

    chosen = choose_heads(whole["induction"], key)
    keep = 1 - chosen.astype(jnp.float32)[:, :, None, :, None]
    return {"count": chosen[0].sum(), **edits.sweep(run, keep, params)}


def draw(axes: list[Axes], trained: dict[str, base.Trained], removed: Metrics) -> None:
    """Draw scores and losses over the steps, and the rise of each loss without sets of heads."""
    for (name, each), color in zip(trained.items(), base.COLORS, strict=False):
        best = each.found["induction"][:, :, -1].max(-1)
        base.draw_band(axes[0], each.steps, best, name, color)
        in_context = each.found["late"] - each.found["early"]
        base.draw_band(axes[1], each.steps, in_context, name, color)
    for i, name in enumerate(("induction heads", "as many other heads")):
        y = [removed[kind][:, 1:].mean(-1) if i else removed[kind][:, 0] for kind in KINDS]
        middle = np.median(y, -1)
        error = np.abs(np.stack([np.min(y, -1), np.max(y, -1)]) - middle)
        x, color = np.arange(len(KINDS)) + 0.4 * i, base.COLORS[i + 2]
        axes[2].bar(x, middle, 0.4, yerr=error, color=color, label=name, capsize=2)
    axes[0].set(xlabel="training step", ylabel="best score in the last layer", ylim=(0, 1.02))
    axes[1].set(xlabel="training step", ylabel="loss, late − early tokens [nats]")
    axes[2].set(ylabel="rise of the loss [nats]")
    axes[2].set_xticks(np.arange(len(KINDS)) + 0.2, [*KINDS.values()], fontsize=8)
    for each_axes in axes:
        each_axes.legend(fontsize=8)


def main() -> None:
    """Train, remove heads, print the numbers and draw the figure."""
    flags = base.read_flags(__doc__, steps=600, seeds=5)
    trained = {}
    config = base.make_config(flags.steps, learning_rate=3e-3, warmup=0.05)
    for name, layers in (("1 layer", 1), ("2 layers", 2)):
        model = base.attention_only(layers, HEADS, FEATURES, TOKENS, scores=(scores.Relative(),))
        task = base.Labelled(model, LENGTH)
        result = trained[name] = base.train(
            *one_model(config, task), draw_batch, steps=flags.steps, seeds=flags.seeds,
            every=max(1, flags.steps // 30), probe=functools.partial(measure, task),
        )  # fmt: skip
        print(f"{name}: {result.seconds:.0f} s")
        for kind, tokens in KINDS.items():
            print(f"  loss, {tokens}: {base.spread(result.found[kind][-1])}")
        print(f"  best score: {base.spread(result.found['induction'][-1].max((1, 2)))}")
    remove = jax.jit(jax.vmap(functools.partial(remove_heads, task, key=jax.random.key(0))))
    removed = jax.device_get(remove(result.state.params))
    print(f"induction heads: {removed['count']}")
    for kind, tokens in KINDS.items():
        print(f"rise without them, {tokens}: {base.spread(removed[kind][:, 0])}")
        print(f"  without others: {base.spread(removed[kind][:, 1:].mean(-1))}")
    figure, axes = base.make_panels("Prefix matching", "In-context learning", "Without heads")
    draw(axes, trained, removed)
    base.save(figure, flags.figure)


if __name__ == "__main__":
    main()
