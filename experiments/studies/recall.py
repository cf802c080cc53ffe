"""The cache that associative recall needs, for each kind of attention.

    python -m experiments.studies.recall --figure=docs/_static/studies/recall.png

Multi-query associative recall (Arora et al., "Zoology", https://arxiv.org/abs/2312.04927): a row
states keys and their values, two tokens a fact, and then queries each key once, in any order. The
answer to a query is the value of its key. Decoders of two layers learn it. Each then decodes new
rows: the facts go into its cache, and the queries read them from there.

One key/value head in int8 answers all from 3.4 KiB, and a window of 8 answers 29% from 8 KiB. After
500 steps chosen blocks and a latent of rank 4 still learn. It takes 5 minutes of CPU time.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.studies import base
from experiments.tasks.task import Batch, Params
from flax_mha import CacheConfig, LanguageModel, MultiHeadAttention, masks, variants
from flax_mha.positions import Rotary

PAIRS, KEYS, VALUES, FEATURES = 8, 16, 8, 32
LENGTH = 3 * PAIRS
NEAR = range(2, LENGTH, 3)
OPTIMIZER: dict[str, Any] = {"learning_rate": 1e-2, "final": 0.3, "b2": 0.95, "clip_norm": 10.0}
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
    layers = {f"K={n}": MultiHeadAttention(2, num_kv_heads=n, **ROTATED) for n in (2, 1)}
    full = layers["K=2"]
    kinds = [Kind("full", size, layer) for size, layer in layers.items()]
    kinds += [Kind("full, int8", *each, CacheConfig("int8")) for each in layers.items()]
    for slots in (8, 16):
        layer = full.clone(mask=masks.Window(slots - 1, 0))
        kinds.append(Kind("window", f"{slots} tokens", layer, CacheConfig(slots=slots)))
    for rank in (4, 16):
        layer = variants.MultiHeadLatentAttention(2, kv_rank=rank, rope_dim=8, **ROTATED)
        kinds.append(Kind("latent", f"rank {rank}", layer))
    layer = variants.DifferentialAttention(2, **ROTATED | {"head_dim": 16})
    kinds.append(Kind("differential", "", layer))
    kinds.append(Kind("forgetting", "", variants.ForgettingAttention(2, head_dim=32)))
    layer = variants.ChosenBlocksAttention(2, block=4, count=2, **ROTATED)
    return [*kinds, Kind("chosen blocks", f"2 of {LENGTH // 4}", layer)]


def draw(key: jax.Array, rows: int = 32) -> Batch:
    """Return rows of facts and queries, with labels and weights at the queries."""
    of_keys, of_values, of_order = jax.random.split(key, 3)
    keys = jnp.argsort(jax.random.uniform(of_keys, (rows, KEYS)))[:, :PAIRS]
    values = KEYS + jax.random.randint(of_values, (rows, PAIRS), 0, VALUES)
    order = jnp.argsort(jax.random.uniform(of_order, (rows, PAIRS)))
    facts = jnp.stack([keys, values], -1).reshape(rows, 2 * PAIRS)
    queries, answers = (jnp.take_along_axis(x, order, 1) for x in (keys, values))
    weight = jnp.arange(LENGTH) >= 2 * PAIRS
    return {
        "tokens": jnp.concatenate([facts, queries], 1),
        "labels": jnp.concatenate([facts, answers], 1),
        "weight": jnp.broadcast_to(weight, (rows, LENGTH)),
        "distance": 2 * PAIRS + jnp.arange(PAIRS) - 2 * order,
    }


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
    """Train and decode all kinds, print their accuracy, and draw it."""
    flags = base.read_flags(__doc__, steps=500, seeds=3)
    batch = draw(jax.random.key(7), 512)
    distance = np.asarray(batch["distance"])
    figure, (cost, reach) = base.make_panels("By cache", "By distance, first of each kind")
    points: dict[str, list[Any]] = {}
    params: dict[str, Params] = {}
    for kind in make_kinds():
        name = f"{kind.family.removesuffix(', int8')} {kind.size}"
        if name not in params:
            task: Any = base.Labelled(kind.model(decode=False), LENGTH)
            trained = base.train_model(task, draw, flags, points=4, **OPTIMIZER)
            params[name] = trained.state.params
        run = jax.jit(jax.vmap(functools.partial(decode, kind, batch=batch)))
        right, size = np.asarray(run(params[name])), count_bytes(kind)
        accuracy = 100 * right.mean((1, 2))
        print(f"| {kind.family} | {kind.size} | {size:,} | {base.spread(accuracy)} |", flush=True)
        points.setdefault(kind.family, []).append((size, accuracy, right))
    for (family, found), color in zip(points.items(), base.COLORS, strict=False):
        sizes, y = (np.asarray([each[i] for each in found]) for i in (0, 1))
        middle = np.median(y, 1)
        bars = (middle - y.min(1), y.max(1) - middle)
        cost.errorbar(sizes / 1024, middle, bars, label=family, color=color, fmt="o-", capsize=2)
        if family != "full, int8":  # the curve of "full"
            near = [[100 * x[distance == d].mean() for x in found[0][2]] for d in NEAR]
            base.draw_band(reach, NEAR, np.asarray(near), family, color)
    cost.set(xlabel="cache of a row (KiB)", xscale="log", ylabel="right answers (%)", ylim=(0, 103))
    cost.set_xticks((2, 4, 8, 16, 32), ("2", "4", "8", "16", "32"))
    cost.minorticks_off()
    cost.legend(frameon=False, fontsize=8)
    reach.set(xlabel="tokens from the fact to its query", ylabel="right answers (%)", ylim=(0, 103))
    base.save(figure, flags.figure)


if __name__ == "__main__":
    main()
