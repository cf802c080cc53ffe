"""Do induction heads appear when a small model starts to learn in context, and does it need them?

The text is Python's documentation, by bytes. The score of a head is its weight on the byte after
the earlier copy of the current one, in random bytes that are repeated once (prefix matching).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes

from experiments.studies import base
from experiments.tasks import text
from experiments.tasks.task import Batch, Metrics, Params
from experiments.trainer.loop import one_model
from flax_mha import edits, scores

LENGTH, LAYERS, HEADS, FEATURES, BATCH = 128, 2, 4, 64, 16
HELD_OUT, REPEATED, DRAWS = 128, 32, 16  # windows, repeated sequences, random sets of heads
EARLY, LATE = slice(8, 16), slice(-32, None)  # places in a window
THRESHOLD = 0.3  # the least score of an induction head
TOKENS = {"early": "text, bytes 9 to 16", "late": "text, last 32 bytes", "copies": "repeated bytes"}


def load() -> tuple[jax.Array, Batch, jax.Array]:
    """Return the training text, held-out windows, and repeated random bytes."""
    training, held = (np.frombuffer(part, np.uint8).astype(np.int32) for part in text.load())
    starts = np.linspace(0, len(held) - LENGTH - 1, HELD_OUT).astype(np.int32)
    windows = held[starts[:, None] + np.arange(LENGTH + 1)]
    return jnp.asarray(training), base.label_next(jnp.asarray(windows)), repeat_bytes(training)


def repeat_bytes(training: np.ndarray) -> jax.Array:
    """Return random orders of frequent bytes, each twice and its first byte, [rows, length + 1]."""
    half = LENGTH // 2
    frequent = np.argsort(-np.bincount(training, minlength=256))[:half]
    rng = np.random.default_rng(0)
    orders = [rng.permutation(frequent) for _ in range(REPEATED)]
    return jnp.asarray(np.tile(np.stack(orders), 3)[:, : LENGTH + 1].astype(np.int32))


def draw_windows(training: jax.Array, key: jax.Array) -> Batch:
    """Return a batch of windows of the text."""
    starts = jax.random.randint(key, (BATCH, 1), 0, len(training) - LENGTH)
    return base.label_next(training[starts + jnp.arange(LENGTH + 1)[None]])


def find_losses(
    task: base.Labelled, variables: Params, held: Batch, repeated: jax.Array
) -> Metrics:  # fmt: skip
    """Return the losses of early and of late bytes in text, and of repeated bytes, in nats."""

    def score(logits: jax.Array, batch: Batch, places: slice) -> jax.Array:
        weight = jnp.zeros_like(batch["weight"]).at[:, places].set(1)
        return task.scores(logits, {**batch, "weight": weight})[0]

    copies = base.label_next(repeated)
    on_text, on_copies = (task.model.apply(variables, x["tokens"]) for x in (held, copies))
    return {
        "early": score(on_text, held, EARLY), "late": score(on_text, held, LATE),
        "copies": score(on_copies, copies, slice(LENGTH // 2, None)),
    }  # fmt: skip


def choose_heads(score: jax.Array, key: jax.Array) -> jax.Array:
    """Return sets of heads [1 + draws, layers, heads], bools: the induction heads, and random ones.

    Each random set has as many heads as the first, or all others if these are fewer.
    """
    is_induction = score >= THRESHOLD
    noise = jnp.where(is_induction[None], 2, jax.random.uniform(key, (DRAWS, *score.shape)))
    ranks = jnp.argsort(jnp.argsort(noise.reshape(DRAWS, -1), -1), -1).reshape(noise.shape)
    others = (ranks < is_induction.sum()) & ~is_induction[None]
    return jnp.concatenate([is_induction[None], others])


def remove_heads(
    task: base.Labelled, held: Batch, repeated: jax.Array, params: Params
) -> tuple[jax.Array, Metrics]:
    """Return the number of induction heads, and the rise of each loss [1 + draws] without a set.

    The output of a removed head is its mean over held-out windows.
    """
    score = base.score_heads(task.model, params, repeated[:, :-1])["induction"]
    means = base.mean_outputs(task.model, params, held["tokens"])
    whole = find_losses(task, {"params": params}, held, repeated)

    def run(keep: jax.Array, params: Params) -> Metrics:
        variables = base.edit_layers(params, "attention_z", keep, (1 - keep) * means)
        return jax.tree.map(jnp.subtract, find_losses(task, variables, held, repeated), whole)

    chosen = choose_heads(score, jax.random.key(0))
    keep = 1 - chosen.astype(jnp.float32)[:, :, None, :, None]
    return chosen[0].sum(), edits.sweep(run, keep, params)


def draw(axes: list[Axes], trained: base.Trained, rise: dict[str, np.ndarray]) -> None:
    """Draw scores and losses over the steps, and the rise of each loss without sets of heads."""
    steps, found = trained.steps, trained.found
    for i, color in zip(range(LAYERS), base.COLORS, strict=False):
        best = found["induction"][:, :, i].max(-1)
        base.draw_band(axes[0], steps, best, f"best head of layer {i + 1}", color)
    in_context = found["late"] - found["early"]
    base.draw_band(axes[1], steps, in_context, "last 32 bytes − bytes 9 to 16", base.COLORS[2])
    for i, name in enumerate(("induction heads", "as many other heads")):
        x = np.arange(len(TOKENS)) + 0.4 * i
        y = np.stack([rise[kind][:, 1:].mean(-1) if i else rise[kind][:, 0] for kind in TOKENS])
        middle = np.median(y, -1)
        error = np.abs(np.stack([y.min(-1), y.max(-1)]) - middle)
        axes[2].bar(x, middle, 0.4, yerr=error, color=base.COLORS[i + 4], label=name, capsize=2)
    axes[0].set(xlabel="training step", ylabel="prefix-matching score", ylim=(0, 1.02))
    axes[1].set(xlabel="training step", ylabel="loss on held-out text [nats per byte]")
    axes[2].set(ylabel="rise of the loss [nats per byte]")
    axes[2].set_xticks(np.arange(len(TOKENS)) + 0.2, [*TOKENS.values()], fontsize=8)
    for each in axes:
        each.legend(fontsize=8)


def main() -> None:
    """Train, remove heads, print the numbers and draw the figure."""
    flags = base.read_flags(__doc__, steps=1000, seeds=3)
    training, held, repeated = load()
    model = base.attention_only(LAYERS, HEADS, FEATURES, 256, scores=(scores.Relative(),))
    task = base.Labelled(model, LENGTH)

    def probe(params: Params, key: jax.Array) -> Metrics:
        del key  # The held-out windows are always the same.
        losses = find_losses(task, {"params": params}, held, repeated)
        return {**losses, **base.score_heads(model, params, repeated[:, :-1])}

    config = base.make_config(flags.steps, learning_rate=6e-3, warmup=0.05)
    trained = base.train(
        *one_model(config, task), functools.partial(draw_windows, training), steps=flags.steps,
        seeds=flags.seeds, every=max(1, flags.steps // 40), probe=probe,
    )  # fmt: skip
    remove = jax.jit(jax.vmap(functools.partial(remove_heads, task, held, repeated)))
    count, rise = jax.device_get(remove(trained.state.params))
    for point in (0, len(trained.steps) // 2, -1):
        print(f"step {trained.steps[point]}:")
        for name in TOKENS:
            print(f"  loss, {TOKENS[name]}: {base.spread(trained.found[name][point])}")
        for i in range(LAYERS):
            best = trained.found["induction"][point, :, i].max(-1)
            print(f"  best score in layer {i + 1}: {base.spread(best)}")
    print(f"induction heads: {count}, {trained.seconds:.0f} s of training")
    for kind, name in TOKENS.items():
        print(f"rise of {name} without them: {base.spread(rise[kind][:, 0])}")
        print(f"  without others: {base.spread(rise[kind][:, 1:].mean(-1))}")
    figure, axes = base.make_panels("Prefix matching", "In-context learning", "Without heads")
    draw(axes, trained, rise)
    base.save(figure, flags.figure)


if __name__ == "__main__":
    main()
