"""Values of a call's softmax, computed next to the kernel that computes the output.

With s the scores of one query (after `scores`, bias and mask) and p their softmax, or the weights
of another of `normalizers`, which has no lse and no entropy:

    weights    p_j = exp(s_j − max_i s_i) / Σ_i exp(s_i − max_i s_i)
    lse        log Σ_j exp(s_j)
    entropy    −Σ_j p_j·log p_j, in nats: 0 if one key takes all weight, log S if all are equal
    max_logit  max_j s_j
    scores     s_j before the mask

A sink takes part in the sums without a weight of its own. A fully masked query has weights and
entropy 0, lse and max_logit −∞. Scores are computed again from q and k, one block of queries at a
time, so only captured weights and scores take memory of T·S. The output does not depend on the
capture, and captured values have gradients.

Sources: Zhai et al., "Stabilizing Transformer Training by Preventing Attention Entropy Collapse",
2023, for the entropy; Dehghani et al., "Scaling Vision Transformers to 22 Billion Parameters",
2023, for the growth of logits.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha import sharding
from flax_mha.base import coordinates, loops, shapes, symbols
from flax_mha.base.coordinates import Array, At, map_score_arrays
from flax_mha.base.shapes import Dims
from flax_mha.kernels.call.capture import SQUARE, Capture
from flax_mha.kernels.call.normalizers import OTHERS
from flax_mha.kernels.call.spec import AttentionSpec
from flax_mha.kernels.xla import reference
from flax_mha.kernels.xla.softmax import divisor, finfo_min
from flax_mha.kernels.xla.tile_plan import Plan, tile_states
from flax_mha.masks import EMPTY, Mask
from flax_mha.masks.algebra import evaluate
from flax_mha.masks.states import is_static

# The scores in memory at a time: 8 MiB in float32, the fastest of 2 to 16 MiB on two CPU cores.
_SCORES = 2**21
# The minimum queries of a block, because each block reads all keys.
_QUERIES = 16
# Each of this many parts of the queries skips the keys that it does not see. Under a causal mask
# this skips 3/8 of the scores.
_PARTS = 4
# Below this, exp(x) is 0 in float64.
_LEAST = -800.0


def observe(
    q: jax.Array, k: jax.Array, lse: jax.Array | None, spec: AttentionSpec, capture: Capture
) -> dict[str, jax.Array]:
    """Return the captured values of a call, on any mesh, sharded by the compiler.

    q is [*B, T, N, H], k [*B, S, K, H], and a captured lse [*B, N, T] comes from any kernel.
    Returns weights in the dtype of q, before dropout, and scores, [*B, heads, queries, S]; and lse,
    entropy and max_logit [*B, heads, queries] in at least float32.

    Raises:
      ValueError: if an index is out of range.
    """
    names = tuple(capture.what)
    chosen = capture.chosen(shapes.Dims.of(q, k, k))
    compute = functools.partial(_compute, names=names, chosen=chosen)
    rows = ("batch", "heads" if capture.heads is None else None, None)
    layouts = {name: (*rows, None) if name in SQUARE else rows for name in names}
    captured = sharding.auto(compute, layouts, q, k, lse, spec)
    return {name: captured[name] for name in names}


def weigh_pairs(
    q: jax.Array, k: jax.Array, spec: AttentionSpec, pairs: Mapping[str, Mask]
) -> dict[str, jax.Array]:
    """Return the mean weight [N] of each head on pairs that the mask allows, by name.

    The mean is over the queries that see such a key, NaN if there are none. The pairs are bound.
    """

    def compute(q: jax.Array, k: jax.Array, spec: AttentionSpec, pairs: Mapping[str, Mask]) -> Any:
        at = spec.at(shapes.Dims.of(q, k, k))
        q, k = reference.heads_first(q, k)

        def weigh(score: jax.Array, *pairs: jax.Array) -> tuple[jax.Array, ...]:
            weights, seen = _softmax(spec, score, None), score != -jnp.inf
            sums = [jnp.where(pair, weights, 0.0).sum(-1) for pair in pairs]
            return *sums, *((pair & seen).any(-1).astype(weights.dtype) for pair in pairs)

        sums = _map_blocks(weigh, q, k, spec, at, tuple(pairs.values()))
        totals = [x.sum((*range(q.ndim - 3), -1)) for x in sums]
        return {name: totals[i] / totals[i + len(pairs)] for i, name in enumerate(pairs)}

    names: dict[str, Any] = dict.fromkeys(pairs, ("heads",))
    return names | sharding.auto(compute, names, q, k, spec, pairs)


def _compute(
    q: jax.Array, k: jax.Array, lse: jax.Array | None, spec: AttentionSpec, names: Sequence[str],
    chosen: tuple[np.ndarray | None, np.ndarray | None],
) -> dict[str, jax.Array]:  # fmt: skip
    captured: dict[str, jax.Array] = {}
    if lse is not None:
        captured["lse"] = pick(lse[..., None], *chosen)[..., 0]
    dtype = q.dtype
    at = spec.at(shapes.Dims.of(q, k, k))
    # With a barrier, XLA shares nothing with the kernel, so the output stays the same to the bit.
    q, k = jax.lax.optimization_barrier((q, k))
    q, k = reference.heads_first(q, k)
    # Arrays over the scores have heads and queries on the same two axes, or size 1 there.
    at, spec = _map_arrays(lambda x: pick(x, *chosen), at, spec)
    q, k = pick(q, *chosen), pick(k, chosen[0], None)
    if spec.sinks is not None and chosen[0] is not None:
        spec = spec.replace(sinks=spec.sinks[chosen[0]])
    if "scores" in names:
        captured["scores"] = reference.scores(q, k, spec.replace(mask=None), at)[0]
    if "weights" in names:
        score, allowed = reference.scores(q, k, spec, at)
        if spec.normalizer in OTHERS:
            weights = OTHERS[spec.normalizer](score, allowed, spec.count)
        else:
            weights = _softmax(spec, score, allowed)
        captured["weights"] = weights.astype(dtype)
    if "entropy" in names or "max_logit" in names:
        summary = functools.partial(_summarize, spec.sinks, "entropy" in names)
        captured |= zip(
            ("max_logit", "entropy"), _map_blocks(summary, q, k, spec, at), strict=False
        )
    return {name: captured[name] for name in names}


def _softmax(spec: AttentionSpec, score: jax.Array, allowed: jax.Array | None) -> jax.Array:
    """Return the weights of scores [*B, N, T, S]."""
    sinks = reference.sinks_by_head(spec, score)
    weights, _, total = reference.exponentials(score, sinks, spec.platform.name)
    weights = weights if allowed is None else jnp.where(allowed, weights, 0.0)
    return weights / divisor(total)


def _map_arrays(fn: Callable[[Any], Any], at: At, tree: Any) -> tuple[At, Any]:
    """Apply fn to coordinates, and to the arrays over the scores in a tree, such as a spec."""
    return jax.tree.map(fn, at), map_score_arrays(fn, tree)


def pick(x: jax.Array, heads: np.ndarray | None, queries: Any) -> jax.Array:
    """Return some heads and queries of x [*B|1, N|1, T|1, ·]. Axes of 1 stay."""
    for axis, indices in ((-3, heads), (-2, queries)):
        if indices is not None and not symbols.at_most(x.shape[axis], 1):
            x = jnp.take(x, indices, axis)
    return x


def _map_blocks(
    summary: Callable[..., tuple[jax.Array, ...]], q: jax.Array, k: jax.Array, spec: AttentionSpec,
    at: At, pairs: tuple[Mask, ...] = (),
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Return the summary of all scores, each result [*B, N, T], one block of queries at a time.

    `summary` takes a block's scores, and the pairs that each of more masks allows in it.
    """
    *rows, T, _ = q.shape
    if symbols.is_symbolic(*rows, T, k.shape[-2]):
        size = _QUERIES
    else:
        scores = math.prod(rows) * k.shape[-2] * (1 + len(pairs))
        size = max(1, min(T, max(_QUERIES, _SCORES // max(1, scores))))

    def summarize_part(queries: Array, keys: slice) -> list[jax.Array]:
        part_k = k[..., keys, :]
        part_at, part_tree = _map_arrays(
            lambda x: x if symbols.at_most(x.shape[-1], 1) else x[..., keys], at, (spec, pairs)
        )

        @jax.checkpoint
        def block(indices: jax.Array) -> tuple[jax.Array, ...]:
            of_block = functools.partial(pick, heads=None, queries=indices)
            block_at, (block_spec, masks) = _map_arrays(of_block, part_at, part_tree)
            score, allowed = reference.scores(of_block(q), part_k, block_spec, block_at)
            score = score if allowed is None else jnp.where(allowed, score, -jnp.inf)
            return summary(score, *(jnp.asarray(evaluate(mask, block_at)) for mask in masks))

        # The last block repeats the last query to be full.
        blocks = coordinates.blocks(queries, 0, size)
        results = loops.map_blocks(block, jnp.asarray(blocks, jnp.int32), (q, k, spec, pairs))
        results = (jnp.moveaxis(x, 0, -2).reshape(*rows, blocks.size) for x in results)
        return [x[..., : queries.shape[0]] for x in results]

    parts = [summarize_part(*part) for part in _split_queries(spec, at, q, k, size)]
    return tuple(jnp.concatenate(x, -1) if len(x) > 1 else x[0] for x in zip(*parts, strict=True))


def _split_queries(
    spec: AttentionSpec, at: At, q: jax.Array, k: jax.Array, size: int
) -> list[tuple[Array, slice]]:
    """Return the parts of the queries, each with the range of keys that it may see, if static."""
    *rows, T, _ = q.shape
    *_, S, H = k.shape
    if spec.mask is not None and not symbols.at_most(T, size):
        dims = Dims(tuple(rows[:-1]), T, S, rows[-1], rows[-1], H, H)
        plan = Plan.of(dims, -(-T // _PARTS), -(-S // (4 * _PARTS)))
        states = tile_states(spec, at, plan)
        if is_static(states):
            parts: list[tuple[Array, slice]] = []
            for part, seen in enumerate(states.max((0, 1)) > EMPTY):
                tiles = np.flatnonzero(seen) if seen.any() else np.zeros(1, int)
                keys = slice(int(tiles[0]) * plan.block_k, int(tiles[-1] + 1) * plan.block_k)
                first = part * plan.block_q
                parts.append((np.arange(first, min(first + plan.block_q, T)), keys))
            return parts
    return [(symbols.count_up(T), slice(None))]


def _summarize(
    sinks: jax.Array | None, has_entropy: bool, score: jax.Array
) -> tuple[jax.Array, ...]:
    """Return the maximum [..., N, T] of scores [..., N, T, S], and the entropy if asked."""
    shape = score.shape[:-1]
    # XLA:CPU takes five times as long for sums of a higher rank.
    score = score.reshape(math.prod(shape), score.shape[-1])
    results = [score.max(-1, initial=-jnp.inf)]
    # Without the exponentials this takes a third of the time.
    if has_entropy:
        if sinks is not None:
            sink = jnp.broadcast_to(sinks.astype(score.dtype)[:, None], shape).reshape(-1, 1)
            score = jnp.concatenate([score, sink], -1)
        x = score - jax.lax.stop_gradient(
            score.max(-1, keepdims=True, initial=finfo_min(score.dtype))
        )
        weight = jnp.exp(x)
        # Clip x to a finite value whose exponential is 0, for finite gradients: 0·log 0 = 0.
        total, moment = weight.sum(-1), (weight * jnp.maximum(x, _LEAST)).sum(-1)
        total = jnp.where(total == 0, 1.0, total)
        results.append(jnp.log(total) - moment / total)
    return tuple(x.reshape(shape) for x in results)
