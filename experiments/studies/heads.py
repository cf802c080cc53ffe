"""Models with attention only, and scores and edits of heads."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from experiments.studies import base
from experiments.tasks.task import Metrics, Params
from flax_mha import Capture, DecoderBlock, MultiHeadAttention, analysis, edits, scores
from flax_mha.models import Decoder, LanguageModel, TokenEmbedding

HEADS, FEATURES = 4, 32  # of a model with attention only
KINDS = "previous", "induction"


class NoMLP(nn.Module):
    """A branch that adds nothing."""

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool | None = None) -> jax.Array:
        """Return zeros."""
        return jnp.zeros_like(x)


def attention_only(layers: int, tokens: int) -> LanguageModel:
    """Return a language model of attention layers with relative positions, and nothing else."""
    layer = MultiHeadAttention(HEADS, use_bias=False, scores=(scores.Relative(),))
    block = DecoderBlock(layer, mlp=NoMLP(), norm="rmsnorm")
    return LanguageModel(TokenEmbedding(tokens, FEATURES), Decoder(layers, block), tied=False)


def train_depths(
    tokens: int, draw: base.Draw, measure: Callable[..., Metrics], flags: Any, rate: float
) -> Iterator[tuple[str, base.Trained]]:
    """Train models of one and of two layers, measured by `measure`, and yield each with a name."""
    optimizer = base.make_adam(flags.steps, rate, warmup=0.05)
    for layers, name in enumerate(("1 layer", "2 layers"), 1):
        model = attention_only(layers, tokens)
        probe = functools.partial(measure, model)
        yield name, base.train_model(model, draw, flags, optimizer, probe=probe)


def walk(bounds: jax.Array, first: jax.Array, draws: jax.Array) -> jax.Array:
    """Return Markov chains, int [rows, T + 1], from first states and uniform draws [T, rows].

    The cumulative sums of a matrix's rows are bounds [rows or 1, states, states − 1].
    """

    def step(state: jax.Array, draw: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = jnp.sum(draw[:, None] > bounds[jnp.arange(len(state)) % len(bounds), state], -1)
        return new, new

    _, others = jax.lax.scan(step, first, draws)
    return jnp.concatenate([first[None], others]).T


def score_heads(model: LanguageModel, variables: Any, tokens: jax.Array) -> Metrics:
    """Return the scores of previous-token and of induction heads, by name [layers, heads]."""
    layers = analysis.detect(model, variables, tokens).values()
    return {name: jnp.stack([x[name] for x in layers]) for name in KINDS}


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


def mean_outputs(model: LanguageModel, params: Params, tokens: jax.Array) -> jax.Array:
    """Return the output of each head, as its mean over sequences, [layers, T, heads, features]."""
    watched = analysis.watch(model, Capture(("z",)))
    _, sown = watched.apply({"params": params}, tokens, mutable="intermediates")
    return jnp.stack([z.mean(0) for z in edits.values(sown).values()])


def replace(params: Params, name: str, keep: jax.Array, value: Any) -> Any:
    """Return variables with edits x ← keep·x + (1 − keep)·value of each attention layer."""
    layers = [at[:-2] for at in flatten_dict(params) if at[-2:] == ("query", "kernel")]
    each = zip(layers, keep, (1 - keep) * value, strict=True)
    changes = {(*layer, name): edits.Edit(*numbers) for layer, *numbers in each}
    return {"params": params, "edits": unflatten_dict(changes)}


def make_masks(importance: np.ndarray) -> np.ndarray:
    """Return masks [steps, layers, N] that remove one head after another, the least one first.

    The most important head of each layer stays.
    """
    stays = importance == importance.max(-1, keepdims=True)
    order = np.lexsort((importance.ravel(), stays.ravel()))
    removed = np.arange(importance.size - len(importance) + 1)
    return (np.argsort(order) >= removed[:, None]).reshape(-1, *importance.shape).astype("f4")
