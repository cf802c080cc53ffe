"""Attention sinks: when they form, and with which normalizers.

    python -m experiments.studies.sinks --figure=docs/_static/studies/sinks.png

Gu et al., "When Attention Sink Emerges in Language Models", https://arxiv.org/abs/2410.10781, on
the task of Guo et al., "Active-Dormant Attention Heads", https://arxiv.org/abs/2410.13835: a row
begins with one fixed token and follows a Markov chain, but after a trigger comes the token before
the trigger. A head has to look back at triggers alone. Elsewhere it has nothing to read.

There the softmax gives 0.26 of its weight to the first token after 800 steps (3 seeds: 0.18 to
0.32), and 0.003 at triggers; a learned sink 0.07, a sink of 0 0.09 (one seed: 0.33), sigmoid 0.01,
softpick 0.05. Losses and largest scores are alike. It takes about two minutes of CPU time.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.studies import base
from experiments.tasks.task import Batch, Metrics, Params
from flax_mha import Capture, LanguageModel, MultiHeadAttention
from flax_mha.analysis import watch
from flax_mha.positions import Rotary

TOKENS, TRIGGERS, LENGTH, FEATURES = 24, 3, 48, 32
FIRST = TOKENS  # the token that every row begins with
# The fields of the attention layer, and True if its sinks stay at 0.
KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "softmax": ({}, False),
    "softmax, learned sink": ({"sinks": True}, False),
    "softmax, off by one": ({"sinks": True}, True),
    "sigmoid": ({"normalizer": "sigmoid"}, False),
    "softpick": ({"normalizer": "softpick"}, False),
}


def make_chain() -> np.ndarray:
    """Return the chain's transitions [TOKENS, TOKENS]: rows are distributions of the next token."""
    weights = np.exp(np.random.default_rng(0).normal(0.0, 1.5, (TOKENS, TOKENS)))
    return weights / weights.sum(-1, keepdims=True)


def draw(key: jax.Array, rows: int = 16) -> Batch:
    """Return rows of tokens, with each next token as label."""
    log_chain = jnp.asarray(np.log(make_chain()), jnp.float32)
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
    # The token after FIRST is any.
    chain = jnp.asarray(np.vstack([make_chain(), np.full((1, TOKENS), 1 / TOKENS)]), jnp.float32)
    is_copied = (tokens < TRIGGERS) & (older != FIRST)
    return -jnp.where(is_copied, 0.0, jnp.log(chain[tokens, labels])).mean()


class Task(base.Labelled):
    """The task with sinks that are not trained."""

    def loss(self, params: Params, batch: Batch, key: jax.Array) -> tuple[jax.Array, Metrics]:
        """Return the loss, without a gradient of sinks."""
        stop = jax.lax.stop_gradient
        params = jax.tree_util.tree_map_with_path(
            lambda path, x: stop(x) if "sinks" in jax.tree_util.keystr(path) else x, params
        )
        return super().loss(params, batch, key)


def make_model(fields: dict[str, Any]) -> LanguageModel:
    """Return a decoder of one layer with these fields of its attention."""
    layer = MultiHeadAttention(2, rotary=Rotary(base=100.0), **fields)
    return base.decoder(1, layer, FEATURES, 2 * FEATURES, TOKENS + 1)


def measure(model: LanguageModel, params: Params, key: jax.Array) -> Metrics:
    """Return the loss above the best one, the weight of the first token, and the top score.

    Weights are means over heads and queries, except the first 8 queries, which see few keys:
    `first` where the next token is drawn, `first_copied` where it is copied, `sum` of all keys, and
    `share` of the first one in it.
    """
    batch = draw(key, 64)
    watched = watch(model, Capture(("weights", "max_logit")))
    logits, sown = watched.apply({"params": params}, batch["tokens"], mutable="intermediates")
    loss, _ = base.Labelled(model, LENGTH).scores(logits, batch)
    sown = sown["intermediates"]["decoder"]["layers_0"]["attention"]
    weights, top = (sown[f"attention_{name}"][0] for name in ("weights", "max_logit"))
    first, total = (x[:, :, 8:].mean(1) for x in (weights[..., 0], weights.sum(-1)))
    copied = batch["tokens"][:, 8:] < TRIGGERS
    return {
        "excess": loss - compute_best(batch), "top": top.max(),
        "first": first.mean(where=~copied), "first_copied": first.mean(where=copied),
        "share": (first / jnp.maximum(total, 1e-6)).mean(where=~copied),
        "sum": total.mean(where=~copied),
    }  # fmt: skip


def main() -> None:
    """Train the models of all kinds, print their sinks, and draw them."""
    flags = base.read_flags(__doc__, steps=800, seeds=3)
    titles = ("Loss above the best", "Weight on the first token", "Largest score")
    figure, panels = base.make_panels(*titles, width=2.8, height=2.4)
    for (kind, (fields, is_frozen)), color in zip(KINDS.items(), base.COLORS, strict=False):
        model = make_model(fields)
        task: Any = (Task if is_frozen else base.Labelled)(model, LENGTH)
        probe = functools.partial(measure, model)
        trained = base.train_model(task, draw, flags, points=20, probe=probe, learning_rate=1e-2)
        for axes, name in zip(panels, ("excess", "first", "top"), strict=True):
            base.draw_band(axes, trained.steps, trained.found[name], kind, color)
        names = ("excess", "first", "share", "sum", "first_copied", "top")
        cells = " | ".join(base.spread(trained.found[name][-1]) for name in names)
        print(f"| {kind} | {cells} |", flush=True)
    panels[0].set(xlabel="training step", ylabel="nats", yscale="log")
    panels[1].set(xlabel="training step", ylabel="mean, nothing to copy", ylim=(0, None))
    panels[2].set(xlabel="training step", ylabel="greatest of 64 rows")
    panels[0].legend(frameon=False, fontsize=7)
    base.save(figure, flags.figure)


if __name__ == "__main__":
    main()
