"""Recall: how much cache does it need, for each kind of attention?

    python -m experiments.studies.recall --figure=docs/_static/studies/recall.png

A row states keys and their values, two tokens a fact, and then queries each key once, in any order.
Decoders of two layers learn to answer with the values. Each then decodes new rows: the facts go
into its cache, and the queries read them from there. It takes 5 minutes of processor time.
docs/studies/recall.md has the answer. Source: Arora et al., "Zoology", arXiv 2312.04927.
"""

import functools
from typing import Any, NamedTuple

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


class Kind(NamedTuple):
    """A kind of attention: a name, its size, the layer, and the cache that it decodes with."""

    family: str
    size: str
    layer: MultiHeadAttention
    cache: CacheConfig | None = None

    def model(self, decode: bool) -> LanguageModel:
        """Return a decoder of two layers, with caches if it decodes."""
        layer = self.layer.clone(decode=True, cache=self.cache) if decode else self.layer
        return base.decoder(2, layer, FEATURES, FEATURES, KEYS + VALUES)


def make_kinds() -> list[Kind]:
    """Return all kinds of attention, in the order of the legend."""
    two, one = (MultiHeadAttention(2, num_kv_heads=n, **ROTATED) for n in (2, 1))
    int8, latent = CacheConfig("int8"), variants.MultiHeadLatentAttention
    latents = {n: latent(2, kv_rank=n, rope_dim=8, **ROTATED) for n in (4, 16)}
    windows = {n: two.clone(mask=masks.Window(n - 1, 0)) for n in (8, 16)}
    differential = variants.DifferentialAttention(2, **ROTATED | {"head_dim": 16})
    blocks = variants.ChosenBlocksAttention(2, block=4, count=2, **ROTATED)
    return [
        Kind("full", "K=2", two), Kind("full", "K=1", one),
        Kind("full, int8", "K=2", two, int8), Kind("full, int8", "K=1", one, int8),
        *(Kind("window", f"{n} tokens", x, CacheConfig(slots=n)) for n, x in windows.items()),
        *(Kind("latent", f"rank {n}", layer) for n, layer in latents.items()),
        Kind("differential", "", differential),
        Kind("forgetting", "", variants.ForgettingAttention(2, head_dim=32)),
        Kind("chosen blocks", f"2 of {LENGTH // 4}", blocks),
    ]  # fmt: skip


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


def decode(kind: Kind, params: Params, batch: Batch) -> jax.Array:
    """Return True where a query is answered right from the cache, [rows, PAIRS]."""
    model, tokens = kind.model(decode=True), batch["tokens"]
    _, held = model.apply({"params": params}, tokens, mutable=["cache"])  # makes room
    for start in (0, 2 * PAIRS):
        call = tokens[:, start : start + 2 * PAIRS]
        logits, held = model.apply({"params": params, **held}, call, mutable=["cache"])
    return logits.argmax(-1) == batch["labels"][:, 2 * PAIRS :]


def count_bytes(kind: Kind) -> int:
    """Return the bytes of all arrays of the cache of one row."""
    tokens = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    made = jax.eval_shape(kind.model(decode=True).init, jax.random.key(0), tokens)
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
    families: dict[str, list[Any]] = {}
    params: dict[str, Params] = {}
    for kind in make_kinds():
        name = f"{kind.family.removesuffix(', int8')} {kind.size}"
        if name not in params:
            model = kind.model(decode=False)
            params[name] = base.train_model(model, draw, flags, optimizer, points=4)[0]
        run = jax.jit(jax.vmap(functools.partial(decode, kind, batch=batch)))
        right, size = np.asarray(run(params[name])), count_bytes(kind)
        accuracy = 100 * right.mean((1, 2))
        print(f"| {kind.family} | {kind.size} | {size:,} | {spread(accuracy)} |", flush=True)
        families.setdefault(kind.family, []).append((size / 1024, accuracy, right))
    for (family, found), color in zip(families.items(), COLORS, strict=False):
        sizes, y = (np.asarray([each[i] for each in found]) for i in (0, 1))
        draw_band(cost, sizes, y, family, color, "o-")
        if family != "full, int8":  # the curve of "full"
            near = [[100 * x[batch["distance"] == d].mean() for x in found[0][2]] for d in NEAR]
            draw_band(reach, NEAR, near, family, color)
    cost.set(xscale="log", xticks=(2, 4, 8, 16, 32), xticklabels=("2", "4", "8", "16", "32"))
    cost.minorticks_off()
    save(figure, flags.figure)


if __name__ == "__main__":
    main()
