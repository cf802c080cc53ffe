"""A look at the softmax of a call, beside whichever kernel computes its output.

With s the scores of one query (after `scores`, bias and mask) and p their softmax:

    weights    p_j = exp(s_j − lse)
    lse        log Σ_j exp(s_j)
    entropy    −Σ_j p_j·log p_j, in nats: 0 where one key takes all, log S where all are equal
    max_logit  max_j s_j

A sink, where there is one, takes part in the sums: an outcome like any key, with no weight to show.
A query that sees no key has weights and entropy 0, lse and max_logit −∞.

The scores are computed again, from the same q and k, a block of queries at a time: only whole
weights take memory of T·S. The output does not know of it, and what is captured has gradients.

Sources: Zhai et al., "Stabilizing Transformer Training by Preventing Attention Entropy Collapse",
2023, for the entropy; Dehghani et al., "Scaling Vision Transformers to 22 Billion Parameters",
2023, for the growth of logits.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence, Set
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha import sharding
from flax_mha.base import checks, coordinates, shapes, symbols
from flax_mha.base.coordinates import Array, At, map_score_arrays
from flax_mha.base.shapes import Dims
from flax_mha.kernels import reference
from flax_mha.kernels.spec import AttentionSpec
from flax_mha.kernels.tile_plan import Plan, tile_states
from flax_mha.masks import EMPTY
from flax_mha.masks.tiles import is_static

Captured: TypeAlias = Literal["weights", "lse", "entropy", "max_logit"]

# Scores that are in memory at a time: 8 MiB in float32, the fastest of 2 to 16 on two CPU cores. At
# least so many queries at a time, for each block of them reads all keys.
_SCORES = 2**21
_QUERIES = 16
# So many parts of the queries each leave out the keys that none of it sees: under a causal mask 3/8
# of the scores are never computed.
_PARTS = 4
# exp(x) is 0 in float64 below.
_LEAST = -800.0


@dataclasses.dataclass(frozen=True)
class Capture:
    """The values of a softmax to return; see `flax_mha.kernels.observe` for their definitions.

    Attributes:
      what: some of "weights", "lse", "entropy" and "max_logit".
      heads: indices of query heads, such as (0, 3) (default: all N).
      queries: indices of queries, such as range(128) (default: all T).

    Raises:
      ValueError, TypeError: if a name is unknown, or heads or queries are not indices. A call says
        whether they are in its range, and none is there twice.
    """

    what: Sequence[Captured]
    heads: Sequence[int] | None = None
    queries: Sequence[int] | None = None

    def __post_init__(self) -> None:
        names = self.what
        # One string is not a collection of names.
        taken = isinstance(names, Sequence | Set) and not isinstance(names, str)
        if not taken or not all(isinstance(x, str) and x in get_args(Captured) for x in names):
            raise ValueError(
                f"Capture takes a tuple of names out of {get_args(Captured)}, got {names!r}"
            )
        # As tuples, for what is static has to be hashable.
        object.__setattr__(self, "what", tuple(names))
        for name in ("heads", "queries"):
            object.__setattr__(self, name, _indices(f"Capture.{name}", getattr(self, name)))

    def chosen(self, dims: Dims) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The indices of heads and queries, if they fit the call."""
        return _within("heads", self.heads, dims.N), _within("queries", self.queries, dims.T)


def as_capture(capture: Any) -> Capture | None:
    """Return the argument `capture`, if it is one.

    Raises:
      TypeError: that says what to write.
    """
    if capture is None or isinstance(capture, Capture):
        return capture
    raise TypeError(
        f"capture must be a flax_mha.Capture, got {checks.describe(capture)}; give "
        f"Capture(('entropy', 'max_logit')), say"
    )


def observe(
    q: jax.Array, k: jax.Array, lse: jax.Array, spec: AttentionSpec, capture: Capture
) -> dict[Captured, jax.Array]:
    """Captures what is asked for, on whatever mesh there is, divided by the compiler.

    Args:
      q: [*B, T, N, H].
      k: [*B, S, K, H].
      lse: [*B, N, T], of any kernel.
      spec: the rest of the call.
      capture: what is asked for.

    Returns:
      weights [*B, heads, queries, S] in the dtype of q, before dropout; lse, entropy and max_logit
      [*B, heads, queries] in float32 at least.

    Raises:
      ValueError: if an index is out of range.
    """
    names = tuple(capture.what)
    chosen = capture.chosen(shapes.Dims.of(q, k, k))
    look = functools.partial(_look, names=names, chosen=chosen)
    rows = ("batch", "heads" if capture.heads is None else None, None)
    layouts = {name: (*rows, None) if name == "weights" else rows for name in names}
    captured = sharding.auto(look, layouts, q, k, lse, spec)
    return {name: captured[name] for name in names}


def _look(
    q: jax.Array, k: jax.Array, lse: jax.Array, spec: AttentionSpec, names: Sequence[Captured],
    chosen: tuple[np.ndarray | None, np.ndarray | None],
) -> dict[Captured, jax.Array]:  # fmt: skip
    if not set(names) - {"lse"}:
        return {name: _pick(lse[..., None], *chosen)[..., 0] for name in names}
    dtype = q.dtype
    at = spec.at(shapes.Dims.of(q, k, k))
    # The observer must not change how the observed is compiled: nothing in common to fuse.
    q, k, lse = jax.lax.optimization_barrier((q, k, lse))
    q, k = reference.heads_first(q, k)
    # Whatever lies over the scores has heads and queries on the same two axes, or 1 there.
    q, lse, at, spec = _cut(lambda x: _pick(x, *chosen), (q, lse[..., None], at, spec))
    k = _pick(k, chosen[0], None)
    if spec.sinks is not None and chosen[0] is not None:
        spec = spec.replace(sinks=spec.sinks[chosen[0]])
    captured: dict[Captured, jax.Array] = {"lse": lse[..., 0]}
    if "weights" in names:
        score, allowed = reference.scores(q, k, spec, at)
        shift = jnp.where(lse == -jnp.inf, 0.0, lse)
        weights = jnp.exp(score - shift)
        if allowed is not None:
            # Where lse is NaN so are all weights, those of masked keys too.
            weights = jnp.where(allowed, weights, 0.0 * shift)
        captured["weights"] = weights.astype(dtype)
    if "entropy" in names:
        summary = functools.partial(_summary, sinks=spec.sinks)
        captured["entropy"], captured["max_logit"] = _by_block(summary, q, k, spec, at)
    elif "max_logit" in names:
        # Alone it takes a third of the time, as exponentials do most of it.
        (captured["max_logit"],) = _by_block(_greatest, q, k, spec, at)
    return {name: captured[name] for name in names}


def _indices(name: str, chosen: Any) -> tuple[int, ...] | None:
    if chosen is None:
        return None
    checks.static(name, chosen)
    if not isinstance(chosen, Sequence | np.ndarray | jax.Array) or isinstance(chosen, str):
        raise ValueError(f"{name} takes indices, such as (0, 3) or range(8), got {chosen!r}")
    indices = np.asarray(checks.integers(name, chosen))
    if indices.ndim != 1 or not indices.size:
        raise ValueError(f"{name} takes indices, such as (0, 3) or range(8), got {chosen!r}")
    return tuple(indices.tolist())


def _within(name: str, chosen: Any, size: int) -> np.ndarray | None:
    if chosen is None:
        return None
    if min(chosen) < -size or max(chosen) >= size:
        raise ValueError(
            f"Capture.{name} must be in [{-size}, {size}), got {chosen!r}; this call has {size}"
        )
    indices = np.asarray(chosen) % size
    if len(set(indices.tolist())) < len(indices):
        raise ValueError(f"Capture.{name} must name each index once, got {chosen!r}")
    return indices


def _cut(fn: Any, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Applies fn to whatever of those parts lies over the scores."""
    q, lse, at, spec = parts
    q, lse, at = jax.tree.map(fn, (q, lse, at))
    return q, lse, at, map_score_arrays(fn, spec)


def _pick(x: jax.Array, heads: np.ndarray | None, queries: Any) -> jax.Array:
    """Some heads and queries of x [*B|1, N|1, T|1, ·]; axes of 1 stand for all."""
    for axis, indices in ((-3, heads), (-2, queries)):
        if indices is not None and not symbols.at_most(x.shape[axis], 1):
            x = jnp.take(x, indices, axis)
    return x


def _by_block(
    summary: Callable[[jax.Array], tuple[jax.Array, ...]], q: jax.Array, k: jax.Array,
    spec: AttentionSpec, at: At,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """The summary of all scores, each result [*B, N, T], computed a block of queries at a time."""
    *rows, T, _ = q.shape
    if symbols.is_symbolic(*rows, T, k.shape[-2]):
        size = _QUERIES
    else:
        size = max(1, min(T, max(_QUERIES, _SCORES // max(1, math.prod(rows) * k.shape[-2]))))

    def of_part(queries: Array, keys: slice) -> list[jax.Array]:
        part_k, part_at, part_spec = _keys(keys, k, at, spec)

        @jax.checkpoint
        def block(indices: jax.Array) -> tuple[jax.Array, ...]:
            pick = functools.partial(_pick, heads=None, queries=indices)
            some_q, _, some_at, some_spec = _cut(pick, (q, (), part_at, part_spec))
            score, allowed = reference.scores(some_q, part_k, some_spec, some_at)
            score = score if allowed is None else jnp.where(allowed, score, -jnp.inf)
            return summary(score)

        # The last block repeats the last query where it reaches beyond it.
        blocks = coordinates.blocks(queries, 0, size)
        results = jax.lax.map(block, jnp.asarray(blocks, jnp.int32))
        results = (jnp.moveaxis(x, 0, -2).reshape(*rows, blocks.size) for x in results)
        return [x[..., : queries.shape[0]] for x in results]

    parts = [of_part(*part) for part in _parts(spec, at, q, k, size)]
    return tuple(jnp.concatenate(x, -1) if len(x) > 1 else x[0] for x in zip(*parts, strict=True))


def _parts(
    spec: AttentionSpec, at: At, q: jax.Array, k: jax.Array, size: int
) -> list[tuple[Array, slice]]:
    """The queries in parts, each with the range of keys that some may see, where that is known."""
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


def _keys(keys: slice, k: jax.Array, at: At, spec: AttentionSpec) -> list[Any]:
    """Takes a range of the keys: of k [*B, N, S, H], and of what lies over the scores."""

    def some(x: Array) -> Array:
        return x if symbols.at_most(x.shape[-1], 1) else x[..., keys]

    return [k[..., keys, :], jax.tree.map(some, at), map_score_arrays(some, spec)]


def _greatest(score: jax.Array) -> tuple[jax.Array]:
    """The maximum [..., N, T] of scores [..., N, T, S]."""
    # Maxima of XLA:CPU leave out NaN, sums don't.
    return (jnp.where(jnp.isnan(score.sum(-1)), jnp.nan, score.max(-1, initial=-jnp.inf)),)


def _summary(score: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Entropy [..., N, T] of the softmax of scores [..., N, T, S] and sinks [N]; their maximum."""
    shape = score.shape[:-1]
    # XLA:CPU takes five times as long over sums of a higher rank.
    score = score.reshape(math.prod(shape), score.shape[-1])
    top = score.max(-1, initial=-jnp.inf)
    shift, sink = top, None
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(score.dtype)[:, None], shape).reshape(-1)
        shift = jnp.maximum(top, sink)
    shift = jax.lax.stop_gradient(jnp.where(shift == -jnp.inf, 0.0, shift))
    total, moment = _sums(score - shift[:, None])
    if sink is not None:
        more, its = _sums(sink[:, None] - shift[:, None])
        total, moment = total + more, moment + its
    # Maxima of XLA:CPU leave out NaN.
    top = jnp.where(jnp.isnan(total), jnp.nan, top)
    total = jnp.where(total == 0, 1.0, total)
    return (jnp.log(total) - moment / total).reshape(shape), top.reshape(shape)


def _sums(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Σ exp(x) and Σ exp(x)·x over the last axis, where 0·log 0 = 0."""
    # Of the least exponent that matters: finite, for the gradient's sake.
    weight = jnp.exp(x)
    return weight.sum(-1), (weight * jnp.maximum(x, _LEAST)).sum(-1)
