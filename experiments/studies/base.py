"""The shared parts of studies: seeds trained as one program, and figures with bands."""

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from configs import pydoc_lm
from experiments import command, outputs, plots
from experiments.tasks.task import Batch, Metrics, Params
from experiments.trainer.loop import one_model
from flax_mha import Capture, DecoderBlock, MultiHeadAttention, analysis, edits
from flax_mha.models import Decoder, LanguageModel, TokenEmbedding

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")


@dataclasses.dataclass(frozen=True)
class Labelled:
    """A task for `one_model`: a model from tokens to logits, scored where a weight says so.

    A batch has `tokens` int [rows, T], `labels` int [rows, T] and `weight` [rows, T].

    Attributes:
      model: a linen module; logits = model.apply(variables, tokens).
      length: T.
    """

    model: Any
    length: int

    def init(self, key: jax.Array) -> Params:
        """Return fresh parameters."""
        return self.model.init(key, jnp.zeros((1, self.length), jnp.int32))["params"]

    def loss(self, params: Params, batch: Batch, key: jax.Array) -> tuple[jax.Array, Metrics]:
        """Return the mean cross entropy in nats, and the accuracy."""
        del key  # no dropout
        return self.scores(self.model.apply({"params": params}, batch["tokens"]), batch)

    def scores(self, logits: jax.Array, batch: Batch) -> tuple[jax.Array, Metrics]:
        """Return the mean cross entropy of logits in nats, and their accuracy."""
        labels, weight = batch["labels"], batch["weight"].astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        is_right = (logits.argmax(-1) == labels).astype(jnp.float32)
        loss, accuracy = ((x * weight).sum() / weight.sum() for x in (losses, is_right))
        return loss, {"accuracy": accuracy}


class NoMLP(nn.Module):
    """A branch that adds nothing, for blocks of attention alone."""

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool | None = None) -> jax.Array:
        """Return zeros."""
        return jnp.zeros_like(x)


def attention_only(
    layers: int, heads: int, features: int, tokens: int, **attention: Any
) -> LanguageModel:
    """Return a language model of attention layers alone, whose other fields are `attention`."""
    layer = MultiHeadAttention(heads, use_bias=False, **attention)
    block = DecoderBlock(layer, mlp=NoMLP(), norm="rmsnorm")
    return LanguageModel(TokenEmbedding(tokens, features), Decoder(layers, block), tied=False)


def decoder(
    layers: int, layer: MultiHeadAttention, features: int, mlp: int, tokens: int
) -> LanguageModel:
    """Return a small pre-norm decoder of these attention layers."""
    block = DecoderBlock(layer, mlp, norm="rmsnorm", activation="relu")
    # Features of size 1 learn recall several times sooner than Flax's default.
    embed = TokenEmbedding(tokens, features, jax.nn.initializers.normal(1.0))
    return LanguageModel(embed, Decoder(layers, block), tied=False)


def label_next(tokens: jax.Array) -> Batch:
    """Return sequences [rows, T + 1] as a batch of `Labelled` that predicts each next token."""
    labels = tokens[:, 1:]
    return {"tokens": tokens[:, :-1], "labels": labels, "weight": jnp.ones(labels.shape)}


def score_heads(model: LanguageModel, params: Params, tokens: jax.Array) -> Metrics:
    """Return the scores of previous-token and of induction heads, by name [layers, heads]."""
    pairs = analysis.token_pairs(tokens)
    pairs = {name: pairs[name] for name in ("previous", "induction")}
    layers = analysis.detect(model, {"params": params}, tokens, pairs=pairs)
    paths = [f"decoder/layers_{i}/attention" for i in range(len(layers))]
    return {name: jnp.stack([layers[path][name] for path in paths]) for name in pairs}


def mean_outputs(model: LanguageModel, params: Params, tokens: jax.Array) -> jax.Array:
    """Return the output of each head, as its mean over sequences, [layers, T, heads, features]."""
    watched = analysis.watch(model, Capture(("z",)))
    _, sown = watched.apply({"params": params}, tokens, mutable="intermediates")
    layers = sown["intermediates"]["decoder"]
    names = [f"layers_{i}" for i in range(len(layers))]
    return jnp.stack([layers[name]["attention"]["attention_z"][0].mean(0) for name in names])


def edit_layers(params: Params, name: str, keep: jax.Array, add: jax.Array) -> Any:
    """Return variables of a language model with edits x ← keep·x + add of each attention layer."""
    changes = {
        f"layers_{i}": {"attention": {name: edits.Edit(keep[i], add[i])}} for i in range(len(keep))
    }
    return {"params": params, "edits": {"decoder": changes}}


def find_layers(params: Params) -> dict[str, int]:
    """Return the number of heads of each attention layer, by path."""
    flat = flatten_dict(params)
    return {"/".join(at[:-2]): x.shape[-2] for at, x in flat.items() if "query" in at}


def mask_heads(params: Params, keep: jax.Array) -> Any:
    """Return variables whose heads are multiplied by keep [layers, N] or [layers, rows, N]."""
    each = [{"attention_z": edits.Edit(keep=factor[..., None, :, None])} for factor in keep]
    nested = unflatten_dict(dict(zip(find_layers(params), each, strict=True)), sep="/")
    return {"params": params, "edits": nested}


def make_config(steps: int, **optimizer: Any) -> ConfigDict:
    """Return a config for `make_optimizer`: AdamW with warmup and cosine decay, as given."""
    config = pydoc_lm.get_config()
    config.steps = steps
    config.optimizer.update({"weight_decay": 0.0, "learning_rate": 1e-3, **optimizer})
    return config


Probe = Callable[[Params, jax.Array], Metrics]


class Trained(NamedTuple):
    """The models of a study after training.

    Attributes:
      state: the final `TrainState`, with a leading axis of seeds.
      steps: the steps after which was measured, [points].
      found: metrics of the steps up to each point, and of the probe, by name [points, seeds, …].
      seconds: the time, with compilation.
    """

    state: Any
    steps: np.ndarray
    found: dict[str, np.ndarray]
    seconds: float


def train(
    create: Callable[..., Any], step: Callable[..., Any], draw: Callable[[jax.Array], Batch], *,
    steps: int, seeds: int, points: int, probe: Probe = lambda params, key: {},
) -> Trained:  # fmt: skip
    """Train models of many seeds as one vmapped program, and measure them on the way.

    Args:
      create: a function of a seed that returns a state, as `one_model` has it.
      step: a function of a state and a batch that returns the new state and metrics.
      draw: a function of a key that returns a batch. Each seed has its own data.
      steps: the number of steps.
      seeds: the number of models.
      points: the number of measurements.
      probe: a function of parameters and a key that returns more metrics, the key being the same
        at each measurement and for all seeds.
    """
    start, every = time.monotonic(), max(1, steps // points)

    def some(state: Any, key: jax.Array) -> tuple[Any, Metrics]:
        def one(state: Any, _: None) -> tuple[Any, Metrics]:
            return step(state, draw(jax.random.fold_in(key, state.step)))

        state, metrics = jax.lax.scan(one, state, length=every)
        found = jax.tree.map(lambda x: x.mean(0), metrics)
        return state, found | probe(state.params, jax.random.key(0))

    run = jax.jit(jax.vmap(some), donate_argnums=0)
    state = jax.jit(jax.vmap(create))(jnp.arange(seeds, dtype=jnp.uint32))
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds) + 1_000_000)
    measured, found = np.arange(every, steps + 1, every), []
    for point in measured:
        state, metrics = run(state, keys)
        found.append(jax.device_get(metrics))
        print(f"step {point:6} of {steps}, loss {np.mean(metrics['loss']):.4f}", flush=True)
    joined = {name: np.stack([each[name] for each in found]) for name in found[0]}
    return Trained(state, measured, joined, time.monotonic() - start)


def train_model(
    task: Any, draw: Callable[[jax.Array], Batch], flags: argparse.Namespace, *,
    points: int = 30, probe: Probe = lambda params, key: {}, **optimizer: Any,
) -> Trained:  # fmt: skip
    """Train models of a task such as `Labelled` as `train` does, by AdamW (see `make_config`)."""
    made = one_model(make_config(flags.steps, **optimizer), task)
    sizes = {"steps": flags.steps, "seeds": flags.seeds, "points": points}
    return train(*made, draw, probe=probe, **sizes)


def read_flags(doc: str, *, steps: int, seeds: int) -> argparse.Namespace:
    """Return the flags of a study: `steps` and `seeds`, with these defaults, and `figure`, a PNG.

    The study's docstring is the help.
    """
    parser = command.Parser(doc)
    count, default = command.count, "(default: %(default)s)"
    add = parser.add_argument
    add("--steps", type=count, default=steps, help=f"of each model {default}")
    add("--seeds", type=count, default=seeds, help=f"models of each kind {default}")
    add("--figure", type=Path, default=Path("study.png"), help=f"the PNG to write {default}")
    read = parser.parse_args()
    read.figure = outputs.try_output(read.figure, "--figure")
    return read


def make_panels(*titles: str, width: float = 4.0, height: float = 3.2) -> tuple[Figure, list[Axes]]:
    """Return a figure with a row of panels."""
    figure = Figure(figsize=(width * len(titles), height), layout="constrained")
    panels = list(figure.subplots(1, len(titles), squeeze=False)[0])
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure, panels


def draw_band(axes: Axes, x: Any, y: Any, label: str, color: str, style: str = "-") -> None:
    """Draw the median over seeds of y [points, seeds] as a line, in a band from least to most."""
    axes.plot(x, np.median(y, -1), style, color=color, label=label, linewidth=1.6)
    axes.fill_between(x, np.min(y, -1), np.max(y, -1), color=color, alpha=0.2, linewidth=0)


def draw_bars(axes: Axes, x: Any, y: Any, label: str, color: str, width: float = 0.8) -> None:
    """Draw the median over seeds of y [seeds, bars], with a line from least to most."""
    middle = np.median(y, 0)
    error = np.abs(np.stack([np.min(y, 0), np.max(y, 0)]) - middle)
    axes.bar(x, middle, width, yerr=error, color=color, label=label, capsize=2)


def save(figure: Figure, path: Path) -> None:
    """Write the figure, and print its path."""
    plots.save(figure, path, 130)
    print(f"figure: {path}")


def spread(values: Any) -> str:
    """Return the median of seeds with the least and the most, as text."""
    return f"{np.median(values):.3f} ({np.min(values):.3f} to {np.max(values):.3f})"
