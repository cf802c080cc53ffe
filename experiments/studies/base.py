"""The shared parts of studies: their flags, and seeds trained as one program."""

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.common import command, outputs
from experiments.tasks.task import Batch, Metrics, Params
from flax_mha import DecoderBlock, MultiHeadAttention
from flax_mha.models import Decoder, LanguageModel, TokenEmbedding

Draw = Callable[[jax.Array], Batch]
Probe = Callable[[Params, jax.Array], Metrics]


class State(NamedTuple):
    """The state of training."""

    step: jax.Array
    params: Params
    opt_state: Any
    key: jax.Array


class Trained(NamedTuple):
    """The models of a study after training."""

    params: Params  # with a leading axis of seeds
    steps: np.ndarray  # after which was measured, [points]
    found: dict[str, np.ndarray]  # metrics by name [points, seeds, …]


def decoder(
    layers: int, layer: MultiHeadAttention, features: int, mlp: int, tokens: int
) -> LanguageModel:
    """Return a small pre-norm decoder of these attention layers."""
    block = DecoderBlock(layer, mlp, norm="rmsnorm", activation="relu")
    # Features of size 1 learn recall several times sooner than Flax's default.
    embed = TokenEmbedding(tokens, features, jax.nn.initializers.normal(1.0))
    return LanguageModel(embed, Decoder(layers, block), tied=False)


def label_next(tokens: jax.Array) -> Batch:
    """Return sequences [rows, T + 1] as a batch where each token's label is the next one."""
    labels = tokens[:, 1:]
    return {"tokens": tokens[:, :-1], "labels": labels, "weight": jnp.ones(labels.shape)}


def score(logits: Any, batch: Batch) -> jax.Array:
    """Return the cross entropy of logits in nats, as a mean by `weight`."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    weight = batch["weight"].astype(jnp.float32)
    return (losses * weight).sum() / weight.sum()


def make_adam(
    steps: int, rate: float, warmup: float = 0.1, final: float = 0.05, b2: float = 0.98,
    clip_norm: float = 1.0,
) -> optax.GradientTransformation:  # fmt: skip
    """Return Adam with clipped gradients, warmup and cosine decay."""
    rise = min(round(warmup * steps), steps - 1)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, rise, steps, final * rate)
    return optax.chain(optax.clip_by_global_norm(clip_norm), optax.adam(schedule, b2=b2))


def make_steps(init: Any, loss: Any, optimizer: optax.GradientTransformation) -> tuple[Any, Any]:
    """Return `create` and `step` for `train`, of init(key) and loss(params, batch, key)."""

    def create(seed: jax.Array) -> State:
        init_key, key = jax.random.split(jax.random.key(seed))
        params = init(init_key)
        return State(jnp.int32(0), params, optimizer.init(params), key)

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        key = jax.random.fold_in(state.key, state.step)
        value, grads = jax.value_and_grad(loss)(state.params, batch, key)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(state.step + 1, params, opt_state, state.key), {"loss": value}

    return create, step


def train_model(
    model: Any, draw: Draw, flags: argparse.Namespace, optimizer: optax.GradientTransformation,
    points: int = 30, probe: Probe = lambda params, key: {},
) -> Trained:  # fmt: skip
    """Train models from tokens to logits with `train`, by the loss `score`."""
    tokens = jnp.zeros_like(draw(jax.random.key(0))["tokens"][:1])

    def loss(params: Params, batch: Batch, _: jax.Array) -> jax.Array:
        return score(model.apply({"params": params}, batch["tokens"]), batch)

    made = make_steps(lambda key: model.init(key, tokens)["params"], loss, optimizer)
    return train(*made, draw, flags.steps, flags.seeds, points, probe)


def train(
    create: Any, step: Any, draw: Draw, steps: int, seeds: int, points: int,
    probe: Probe = lambda params, key: {},
) -> Trained:  # fmt: skip
    """Train models of many seeds as one vmapped program, each on its own data.

    At each of `points`, it measures the mean of the steps' metrics since the last one, and those of
    `probe`, whose key is always the same.
    """
    start, every = time.monotonic(), max(1, steps // points)

    def advance(state: State, key: jax.Array) -> tuple[State, Metrics]:
        def one(state: State, _: None) -> tuple[State, Metrics]:
            return step(state, draw(jax.random.fold_in(key, state.step)))

        state, metrics = jax.lax.scan(one, state, length=every)
        means = jax.tree.map(lambda x: x.mean(0), metrics)
        return state, means | probe(state.params, jax.random.key(0))

    advance_all = jax.jit(jax.vmap(advance), donate_argnums=0)
    state = jax.jit(jax.vmap(create))(jnp.arange(seeds, dtype=jnp.uint32))
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds) + 1_000_000)
    measured, found = np.arange(every, steps + 1, every), []
    for point in measured:
        state, metrics = advance_all(state, keys)
        found.append(jax.device_get(metrics))
        loss, seconds = found[-1]["loss"].mean(), time.monotonic() - start
        print(f"step {point:6} of {steps}, loss {loss:.4f}, {seconds:.0f} s", flush=True)
    return Trained(state.params, measured, jax.tree.map(lambda *x: np.stack(x), *found))


def read_flags(doc: str, *, steps: int, seeds: int) -> argparse.Namespace:
    """Return the flags of a study, whose docstring is the help: steps, seeds and figure."""
    parser, shown = command.Parser(doc), "(default: %(default)s)"
    for flag, value, text in (("--steps", steps, "training steps"), ("--seeds", seeds, "models")):
        parser.add_argument(flag, type=command.count, default=value, help=f"{text} {shown}")
    parser.add_argument("--figure", default="study.png", help=f"the PNG to write {shown}")
    flags = parser.parse_args()
    flags.figure = outputs.try_output(flags.figure, "--figure")
    return flags
