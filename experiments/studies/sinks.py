"""When does a model learn to attend to the first token, and does the normalizer decide it?

    python -m experiments.studies.sinks --figure=docs/_static/studies/sinks.png

A row begins with one fixed token and follows a Markov chain, but after a trigger comes the token
before the trigger. A head has something to read only there. It takes about two minutes of processor
time. docs/studies/sinks.md has the answer. Sources: Gu et al., arXiv 2410.10781; the task: Guo et
al., arXiv 2410.13835.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.studies import base
from experiments.studies.figures import COLORS, draw_band, make_panels, save, spread
from experiments.tasks.task import Batch, Metrics, Params
from flax_mha import Capture, LanguageModel, MultiHeadAttention, analysis
from flax_mha.positions import Rotary

TOKENS, TRIGGERS, LENGTH, FEATURES = 24, 3, 48, 32
FIRST = TOKENS  # the token that every row begins with
OFF_BY_ONE = "softmax, off by one"  # its sinks stay at 0
KINDS: dict[str, dict[str, Any]] = {  # the fields of the attention layer
    "softmax": {}, "softmax, learned sink": {"sinks": True}, OFF_BY_ONE: {"sinks": True},
    "sigmoid": {"normalizer": "sigmoid"}, "softpick": {"normalizer": "softpick"},
}  # fmt: skip
# The chain: rows are distributions of the next token. The token after FIRST is any.
WEIGHTS = np.exp(np.random.default_rng(0).normal(0.0, 1.5, (TOKENS, TOKENS)))
CHAIN = np.vstack([WEIGHTS / WEIGHTS.sum(-1, keepdims=True), np.full((1, TOKENS), 1 / TOKENS)])


def draw(key: jax.Array, rows: int = 16) -> Batch:
    """Return rows of tokens, labels, and the least loss that a model can expect, in nats."""
    log_chain = jnp.asarray(np.log(CHAIN), jnp.float32)
    first, *keys = jax.random.split(key, LENGTH)

    def follow(before: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple[Any, Any]:
        older, last = before
        # A trigger that is first has only FIRST before it, which is no token of the chain.
        is_copied = (last < TRIGGERS) & (older != FIRST)
        token = jnp.where(is_copied, older, jax.random.categorical(key, log_chain[last]))
        return (last, token), (token, jnp.where(is_copied, 0.0, -log_chain[last, token]))

    last = jax.random.randint(first, (rows,), 0, TOKENS)
    start = jnp.full_like(last, FIRST)
    _, (more, losses) = jax.lax.scan(follow, (start, last), jnp.stack(keys))
    best = (np.log(TOKENS) + losses.sum(0).mean()) / LENGTH
    return {**base.label_next(jnp.concatenate([jnp.stack([start, last]), more]).T), "best": best}


def make_model(kind: str) -> LanguageModel:
    """Return a decoder of one layer."""
    layer = MultiHeadAttention(2, rotary=Rotary(base=100.0), **KINDS[kind])
    return base.decoder(1, layer, FEATURES, 2 * FEATURES, TOKENS + 1)


def make_optimizer(kind: str, steps: int) -> optax.GradientTransformation:
    """Return Adam, which leaves the sinks of the softmax off by one at 0."""
    adam, find = base.make_adam(steps, 1e-2), jax.tree_util.tree_map_with_path
    fixed = functools.partial(find, lambda at, _: kind == OFF_BY_ONE and "sinks" in str(at))
    return optax.chain(optax.masked(optax.set_to_zero(), fixed), adam)


def measure(kind: str, params: Params, key: jax.Array) -> Metrics:
    """Return the loss above the best one, the weight of the first token, and the top score.

    Weights are means over heads and queries from the 8th on: `first` where the next token is drawn,
    `first_copied` where it is copied, `sum` of all keys, and `share` of the first one in it.
    """
    batch = draw(key, 64)
    watched = analysis.watch(make_model(kind), Capture(("weights", "max_logit")))
    logits, sown = watched.apply({"params": params}, batch["tokens"], mutable="intermediates")
    sown = sown["intermediates"]["decoder"]["layers_0"]["attention"]
    weights, top = (sown[f"attention_{name}"][0] for name in ("weights", "max_logit"))
    first, total = (x[:, :, 8:].mean(1) for x in (weights[..., 0], weights.sum(-1)))
    copied = batch["tokens"][:, 8:] < TRIGGERS
    found = {"first": first, "share": first / jnp.maximum(total, 1e-6), "sum": total}
    means = {name: x.mean(where=~copied) for name, x in found.items()}
    excess = base.score(logits, batch) - batch["best"]
    return means | {"first_copied": first.mean(where=copied), "excess": excess, "top": top.max()}


def main() -> None:
    """Train the models of all kinds, draw their sinks, and print them."""
    flags = base.read_flags(__doc__, steps=800, seeds=3)
    figure, panels = make_panels({
        "Loss above the best": ("training step", "nats"),
        "Weight on the first token": ("training step", "mean, nothing to copy"),
        "Largest score": ("training step", "greatest of 64 rows"),
    }, width=2.8, height=2.4)  # fmt: skip
    for kind, color in zip(KINDS, COLORS, strict=False):
        model, optimizer = make_model(kind), make_optimizer(kind, flags.steps)
        probe = functools.partial(measure, kind)
        _, steps, found = base.train_model(model, draw, flags, optimizer, 20, probe)
        for axes, name in zip(panels, ("excess", "first", "top"), strict=True):
            draw_band(axes, steps, found[name], kind, color)
        names = ("excess", "first", "share", "sum", "first_copied", "top")
        print(f"| {kind} |", " | ".join(spread(found[name][-1]) for name in names), flush=True)
    panels[0].set_yscale("log")
    panels[1].set_ylim(0, None)
    save(figure, flags.figure)


if __name__ == "__main__":
    main()
