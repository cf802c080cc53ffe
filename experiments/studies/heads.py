"""Models with attention only, and scores, choices and edits of heads."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from experiments.tasks.task import Metrics, Params
from flax_mha import Capture, DecoderBlock, MultiHeadAttention, analysis, edits, scores
from flax_mha.models import Decoder, LanguageModel, TokenEmbedding


class NoMLP(nn.Module):
    """A branch that adds nothing."""

    @nn.compact
    def __call__(self, x: jax.Array, *, deterministic: bool | None = None) -> jax.Array:
        """Return zeros."""
        return jnp.zeros_like(x)


def attention_only(layers: int, heads: int, features: int, tokens: int) -> LanguageModel:
    """Return a language model of attention layers with relative positions, and nothing else."""
    layer = MultiHeadAttention(heads, use_bias=False, scores=(scores.Relative(),))
    block = DecoderBlock(layer, mlp=NoMLP(), norm="rmsnorm")
    return LanguageModel(TokenEmbedding(tokens, features), Decoder(layers, block), tied=False)


def walk(bounds: jax.Array, first: jax.Array, draws: jax.Array) -> jax.Array:
    """Return Markov chains, int [rows, T + 1], from first states and uniform draws [T, rows].

    The cumulative sums of a matrix's rows are bounds [rows or 1, states, states − 1].
    """

    def step(state: jax.Array, draw: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = jnp.sum(draw[:, None] > bounds[jnp.arange(len(state)) % len(bounds), state], -1)
        return new, new

    _, others = jax.lax.scan(step, first, draws)
    return jnp.concatenate([first[None], others]).T


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


def mask_heads(params: Any, keep: jax.Array) -> Any:
    """Return variables whose heads are multiplied by keep [layers, N] or [layers, rows, N]."""
    layers = ["/".join(at[:-2]) for at in flatten_dict(params) if "query" in at]
    each = [{"attention_z": edits.Edit(keep=factor[..., None, :, None])} for factor in keep]
    return {"params": params, "edits": unflatten_dict(dict(zip(layers, each, strict=True)), "/")}


def make_masks(importance: np.ndarray) -> np.ndarray:
    """Return masks [steps, layers, N] that remove one head after another, the least one first.

    The most important head of each layer stays.
    """
    stays = importance == importance.max(-1, keepdims=True)
    order = np.lexsort((importance.ravel(), stays.ravel()))
    removed = np.arange(importance.size - len(importance) + 1)
    return (np.argsort(order) >= removed[:, None]).reshape(-1, *importance.shape).astype("f4")


def choose_heads(
    score: jax.Array, number: int, key: jax.Array, threshold: float, draws: int
) -> jax.Array:
    """Return sets of heads [1 + draws, layers, heads], bools: the best, and random other ones.

    All have a number of heads, or fewer: the first of induction heads, the others of other heads.
    """
    is_induction = score >= threshold
    best = (score >= jnp.sort(score.reshape(-1))[-number]) & is_induction
    noise = jnp.where(is_induction[None], 2, jax.random.uniform(key, (draws, *score.shape)))
    bound = jnp.sort(noise.reshape(draws, -1), -1)[:, number - 1, None, None]
    return jnp.concatenate([best[None], (noise <= bound) & ~is_induction[None]])
