"""When does a model learn to attend to the first token, and does the normalizer decide it?

    python -m experiments.studies.sinks --figure=docs/_static/studies/sinks.png

A row begins with one fixed token and follows a Markov chain, but after a trigger comes the token
before the trigger. A head has something to read only there. It takes about two minutes of processor
time. docs/studies/sinks.md has the answer. Sources: Gu et al., "When Attention Sink Emerges in
Language Models", arXiv 2410.10781; the task: Guo et al., "Active-Dormant Attention Heads", arXiv
2410.13835.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.studies import base
from experiments.studies.figures import COLORS, draw_band, make_panels, save, spread
from experiments.tasks.task import Batch, Metrics, Params
from flax_mha import Capture, LanguageModel, MultiHeadAttention
from flax_mha.analysis import watch
from flax_mha.positions import Rotary

TOKENS, TRIGGERS, LENGTH, FEATURES = 24, 3, 48, 32
FIRST = TOKENS  # the token that every row begins with
OFF_BY_ONE = "softmax, off by one"  # its sinks stay at 0
KINDS: dict[str, dict[str, Any]] = {  # the fields of the attention layer
    "softmax": {},
    "softmax, learned sink": {"sinks": True},
    OFF_BY_ONE: {"sinks": True},
    "sigmoid": {"normalizer": "sigmoid"},
    "softpick": {"normalizer": "softpick"},
}


# The chain: rows are distributions of the next token. The token after FIRST is any.
WEIGHTS = np.exp(np.random.default_rng(0).normal(0.0, 1.5, (TOKENS, TOKENS)))
CHAIN = np.vstack([WEIGHTS / WEIGHTS.sum(-1, keepdims=True), np.full((1, TOKENS), 1 / TOKENS)])


def draw(key: jax.Array, rows: int = 16) -> Batch:
    """Return rows of tokens, with each next token as label."""
    log_chain = jnp.asarray(np.log(CHAIN), jnp.float32)
    first, *keys = jax.random.split(key, LENGTH)

    def follow(before: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple[Any, jax.Array]:
        older, last = before
        drawn = jax.random.categorical(key, log_chain[last])
        # A trigger that is first has only FIRST before it, which is no token of the chain.
        token = jnp.where((last < TRIGGERS) & (older != FIRST), older, drawn)
        return (last, token), token

    last = jax.random.randint(first, (rows,), 0, TOKENS)
    start = jnp.full_like(last, FIRST)
    _, more = jax.lax.scan(follow, (start, last), jnp.stack(keys))
    return base.label_next(jnp.concatenate([jnp.stack([start, last]), more]).T)


def compute_best(batch: Batch) -> jax.Array:
    """Return the least loss that a model can expect on a batch, in nats: the true chain's."""
    tokens, labels = batch["tokens"], batch["labels"]
    older = jnp.pad(tokens, ((0, 0), (1, 0)), constant_values=FIRST)[:, :-1]
    is_copied = (tokens < TRIGGERS) & (older != FIRST)
    log_chain = jnp.log(jnp.asarray(CHAIN, jnp.float32))
    return -jnp.where(is_copied, 0.0, log_chain[tokens, labels]).mean()


def make_model(kind: str) -> LanguageModel:
    """Return a decoder of one layer."""
    layer = MultiHeadAttention(2, rotary=Rotary(base=100.0), **KINDS[kind])
    return base.decoder(1, layer, FEATURES, 2 * FEATURES, TOKENS + 1)


def find_loss(kind: str, params: Params, batch: Batch, _: jax.Array) -> jax.Array:
    """Return the loss, for the softmax off by one without a gradient of its sinks."""
    stop = jax.lax.stop_gradient if kind == OFF_BY_ONE else lambda x: x
    params = jax.tree_util.tree_map_with_path(
        lambda at, x: stop(x) if "sinks" in str(at) else x, params
    )
    return base.score(make_model(kind).apply({"params": params}, batch["tokens"]), batch)


def measure(kind: str, params: Params, key: jax.Array) -> Metrics:
    """Return the loss above the best one, the weight of the first token, and the top score.

    Weights are means over heads and queries, except the first 8 queries, which see few keys:
    `first` where the next token is drawn, `first_copied` where it is copied, `sum` of all keys, and
    `share` of the first one in it.
    """
    batch = draw(key, 64)
    watched = watch(make_model(kind), Capture(("weights", "max_logit")))
    logits, sown = watched.apply({"params": params}, batch["tokens"], mutable="intermediates")
    sown = sown["intermediates"]["decoder"]["layers_0"]["attention"]
    weights, top = (sown[f"attention_{name}"][0] for name in ("weights", "max_logit"))
    first, total = (x[:, :, 8:].mean(1) for x in (weights[..., 0], weights.sum(-1)))
    copied = batch["tokens"][:, 8:] < TRIGGERS
    found = {"first": first, "share": first / jnp.maximum(total, 1e-6), "sum": total}
    means = {name: x.mean(where=~copied) for name, x in found.items()}
    excess = base.score(logits, batch) - compute_best(batch)
    return means | {"first_copied": first.mean(where=copied), "excess": excess, "top": top.max()}


def main() -> None:
    """Train the models of all kinds, draw their sinks, and print them."""
    flags = base.read_flags(__doc__, steps=800, seeds=3)
    labels = {
        "Loss above the best": "nats", "Weight on the first token": "mean, nothing to copy",
        "Largest score": "greatest of 64 rows",
    }  # fmt: skip
    titles = {title: ("training step", label) for title, label in labels.items()}
    figure, panels = make_panels(titles, width=2.8, height=2.4)
    optimizer = base.make_adam(flags.steps, 1e-2)
    for kind, color in zip(KINDS, COLORS, strict=False):
        probe, loss = functools.partial(measure, kind), functools.partial(find_loss, kind)
        model = make_model(kind)
        _, steps, found = base.train_model(model, draw, flags, optimizer, 20, probe, loss)
        for axes, name in zip(panels, ("excess", "first", "top"), strict=True):
            draw_band(axes, steps, found[name], kind, color)
        names = ("excess", "first", "share", "sum", "first_copied", "top")
        print(f"| {kind} |", " | ".join(spread(found[name][-1]) for name in names), flush=True)
    panels[0].set_yscale("log")
    panels[1].set_ylim(0, None)
    save(figure, flags.figure)


if __name__ == "__main__":
    main()
