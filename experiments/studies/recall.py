"""Recall: how much cache does it need, for each kind of attention?

    python -m experiments.studies.recall --figure=docs/_static/studies/recall.png

A row states keys and their values, two tokens a fact, and then queries each key once. Decoders of
two layers learn to answer with the values. Each then decodes new rows from its cache.
docs/studies/recall.md has the answer. Source: Arora et al., "Zoology", arXiv 2312.04927.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.studies import base
from experiments.studies.figures import COLORS, draw_band, make_panels, save, spread
from experiments.tasks.task import Batch, Params
from flax_mha import CacheConfig, LanguageModel, MultiHeadAttention, masks, variants
from flax_mha.positions import Rotary

PAIRS, KEYS, VALUES, FEATURES = 8, 16, 8, 32
LENGTH = 3 * PAIRS
NEAR = range(2, LENGTH, 3)
ROTATED: dict[str, Any] = {"head_dim": 32, "rotary": Rotary(base=100.0)}

TWO, ONE = (MultiHeadAttention(2, num_kv_heads=n, **ROTATED) for n in (2, 1))
INT8, LATENT = CacheConfig("int8"), variants.MultiHeadLatentAttention
WINDOWS = {n: TWO.clone(mask=masks.Window(n - 1, 0), cache=CacheConfig(slots=n)) for n in (8, 16)}
# The layers of each kind by size, in the order of the legend.
KINDS: dict[str, dict[str, MultiHeadAttention]] = {
    "full": {"K=2": TWO, "K=1": ONE},
    "full, int8": {"K=2": TWO.clone(cache=INT8), "K=1": ONE.clone(cache=INT8)},
    "window": {f"{n} tokens": layer for n, layer in WINDOWS.items()},
    "latent": {f"rank {n}": LATENT(2, kv_rank=n, rope_dim=8, **ROTATED) for n in (4, 16)},
    "differential": {"": variants.DifferentialAttention(2, **ROTATED | {"head_dim": 16})},
    "forgetting": {"": variants.ForgettingAttention(2, head_dim=32)},
    "chosen blocks": {"2 of 6": variants.ChosenBlocksAttention(2, block=4, count=2, **ROTATED)},
}


def make_model(layer: MultiHeadAttention, decode: bool) -> LanguageModel:
    """Return a decoder of two layers, with caches if it decodes."""
    return base.decoder(2, layer.clone(decode=decode), FEATURES, FEATURES, KEYS + VALUES)


def draw(key: jax.Array, rows: int = 32) -> Batch:
    """Return rows of facts and queries, with labels and weights at the queries."""
    of_keys, of_values, of_order = jax.random.split(key, 3)
    keys = jnp.argsort(jax.random.uniform(of_keys, (rows, KEYS)))[:, :PAIRS]
    values = KEYS + jax.random.randint(of_values, (rows, PAIRS), 0, VALUES)
    order = jnp.argsort(jax.random.uniform(of_order, (rows, PAIRS)))
    facts = jnp.stack([keys, values], -1).reshape(rows, 2 * PAIRS)
    queries, answers = (jnp.take_along_axis(x, order, 1) for x in (keys, values))
    tokens, labels = (jnp.concatenate([facts, x], 1) for x in (queries, answers))
    weight = jnp.broadcast_to(jnp.arange(LENGTH) >= 2 * PAIRS, (rows, LENGTH))
    distance = 2 * PAIRS + jnp.arange(PAIRS) - 2 * order
    return {"tokens": tokens, "labels": labels, "weight": weight, "distance": distance}


def decode(layer: MultiHeadAttention, params: Params, batch: Batch) -> jax.Array:
    """Return True where a query is answered right from the cache, [rows, PAIRS]."""
    model, tokens = make_model(layer, decode=True), batch["tokens"]
    _, held = model.apply({"params": params}, tokens, mutable=["cache"])  # makes room
    for start in (0, 2 * PAIRS):
        call = tokens[:, start : start + 2 * PAIRS]
        logits, held = model.apply({"params": params, **held}, call, mutable=["cache"])
    return logits.argmax(-1) == batch["labels"][:, 2 * PAIRS :]


def count_bytes(layer: MultiHeadAttention) -> int:
    """Return the bytes of all arrays of the cache of one row."""
    model, tokens = make_model(layer, decode=True), jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    made = jax.eval_shape(model.init, jax.random.key(0), tokens)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(made["cache"]))


def main() -> None:
    """Train and decode all kinds, draw their accuracy, and print it."""
    flags = base.read_flags(__doc__, steps=500, seeds=3)
    batch, share = draw(jax.random.key(7), 512), "right answers (%)"
    figure, (cost, reach) = make_panels({
        "By cache": ("cache of a row (KiB)", share),
        "By distance, first of each kind": ("tokens from the fact to its query", share),
    })  # fmt: skip
    optimizer = base.make_adam(flags.steps, 1e-2, final=0.3, b2=0.95, clip_norm=10.0)
    trained: dict[MultiHeadAttention, Params] = {}
    for (family, layers), color in zip(KINDS.items(), COLORS, strict=False):
        rights, sizes = [], [count_bytes(layer) for layer in layers.values()]
        for (name, layer), size in zip(layers.items(), sizes, strict=True):
            plain = layer.clone(cache=None)  # int8 decodes what "full" has learned.
            if plain not in trained:
                model = make_model(plain, decode=False)
                trained[plain] = base.train_model(model, draw, flags, optimizer, points=4).params
            run = jax.jit(jax.vmap(functools.partial(decode, layer, batch=batch)))
            rights.append(100 * np.asarray(run(trained[plain])))
            accuracy = spread(rights[-1].mean((1, 2)))
            print(f"| {family} | {name} | {size:,} | {accuracy} |", flush=True)
        draw_band(cost, np.array(sizes) / 1024, np.mean(rights, (2, 3)), family, color, "o-")
        if family != "full, int8":  # the curve of "full"
            near = [[x[batch["distance"] == d].mean() for x in rights[0]] for d in NEAR]
            draw_band(reach, NEAR, near, family, color)
    cost.set(xscale="log", xticks=(2, 4, 8, 16, 32), xticklabels=("2", "4", "8", "16", "32"))
    cost.minorticks_off()
    save(figure, flags.figure)


if __name__ == "__main__":
    main()
