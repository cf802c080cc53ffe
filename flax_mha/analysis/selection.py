"""Selection of some heads in arrays, masks and scores."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from flax_mha import masks, scores
from flax_mha.base import checks
from flax_mha.base.trees import tree_nodes
from flax_mha.masks.base import Not, Or, as_mask

# The axis of heads, from the end, of the arrays in masks and scores.
_AXES: dict[type, dict[str, int]] = {
    masks.Dense: {"array": -3}, masks.BlockSparse: {"blocks": -3}, scores.Bias: {"array": -3},
    scores.Alibi: {"slopes": -1}, scores.RelativeBias: {"table": -2},
    scores.Relative: {"table": -3},
    scores.TransformerXL: {"content_bias": -2, "position_bias": -2, "kernel": -2},
}  # fmt: skip
# Without heads, as far as the masks that they join.
_WITHOUT_HEADS = (
    masks.And, Or, Not, masks.Causal, masks.Dilated, masks.Documents, masks.Keys, masks.Lengths,
    masks.Neighborhood, masks.Prefix, masks.Segments, masks.Window, scores.SoftCap,
)  # fmt: skip


def heads_to_keep(
    name: str, removed: Any, N: int, K: int, layers: Sequence[int], repeat_kv: bool
) -> np.ndarray:
    """Return the heads to keep of a layer, int [*layers, K', G'], a row for each key/value head.

    Args:
      name: the layer's path.
      removed: indices of heads, or a dict of them by layer.
      N: the number of query heads.
      K: the number of key/value heads.
      layers: the sizes of the axes of layers under scan; none for one layer.
      repeat_kv: True if several rows may be of the same key/value head.
    """
    steps = range(math.prod(layers))
    by_step = removed if isinstance(removed, Mapping) else dict.fromkeys(steps, removed)
    if unknown := [*{*by_step} - {*steps}]:
        raise ValueError(
            f"heads of {name} must be by layers 0 … {steps[-1]}, got {unknown}; change the layers"
        )
    rows = []
    for step in steps:
        heads = checks.sizes(f"heads of {name}", by_step.get(step, ()))
        if unknown := [head for head in heads if head >= N]:
            raise ValueError(f"heads of {name} must be in 0 … {N - 1}, got {unknown}; change them")
        rows.append([head for head in range(N) if head not in heads])
    counts = [len(row) for row in rows]
    if not all(counts):
        raise ValueError(
            f"{name} must keep one of its {N} heads, got all to remove; leave one, or the layer out"
        )
    if len({*counts}) > 1:
        raise ValueError(
            f"{name} must keep as many heads in each layer under scan, got {counts}; remove as "
            f"many from each, or unstack the layers and set scan=False"
        )
    groups = {int(n) for row in rows for n in np.bincount(np.array(row) // (N // K)) if n}
    size = math.gcd(*groups)
    if groups != {size} and not repeat_kv:
        raise ValueError(
            f"key/value heads of {name} must keep as many query heads each, or none, got "
            f"{sorted(groups)}; give repeat_kv=True to repeat keys and values"
        )
    return np.array(rows).reshape(*layers, -1, size)


def index_of(kept: np.ndarray, N: int, K: int, size: int, is_kv: bool = False) -> np.ndarray:
    """Return the indices [*layers, n] of heads along an axis of r·N heads, or r·K if `is_kv`.

    Each head has r entries, as in differential attention: r key/value heads in a row, each read by
    N/K query heads in a row.
    """
    k, g = (x[..., None, :] for x in np.divmod(kept, N // K))
    r = size // (K if is_kv else N)
    k = k * r + np.arange(r)[:, None]
    index: np.ndarray = k[..., 0] if is_kv else k * (N // K) + g
    return index.reshape(*kept.shape[:-2], -1)


def take(x: Any, index: np.ndarray, axis: int) -> Any:
    """Return the entries of an index [*layers, n] along an axis of x, counted from the end."""

    def pick(x: Any, index: Any) -> Any:
        return x[(..., index, *[slice(None)] * (-axis - 1))]

    for _ in index.shape[:-1]:
        pick = jax.vmap(pick)
    return pick(x, index)


def check_shared(owner: str, name: str, index: np.ndarray | None) -> np.ndarray:
    """Return the index of the heads, after a check that layers that share `name` keep the same."""
    if index is None:
        raise ValueError(
            f"layers that share {name} in {owner} must lose the same heads; remove the same from "
            f"each, or give each layer its own"
        )
    return index


def select(owner: str, x: Any, index: np.ndarray | None, count: int) -> Any:
    """Return a mask or score for the heads of an index [n] of its `count` heads.

    The index is None if the heads differ between layers that share x. A mask or score without heads
    is returned as it is.
    """
    x = x if isinstance(x, scores.ScoreMod) else as_mask(x)
    nodes = [node for node in tree_nodes(x) if isinstance(node, masks.Mask | scores.ScoreMod)]
    if all(isinstance(node, _WITHOUT_HEADS) for node in nodes):
        return x
    again = functools.partial(select, owner, index=index, count=count)
    name = type(x).__name__
    if isinstance(x, Not):
        return Not(again(x.mask))
    if isinstance(x, masks.And | Or):
        return x.replace(masks=tuple(map(again, x.masks)))
    index = check_shared(owner, name, index)
    if isinstance(x, masks.PerHead):
        return x.replace(masks=tuple(again(x.masks[i]) for i in index))
    if isinstance(x, masks.Predicate | scores.Score):
        return _renumbered(x, index)
    if type(x) not in _AXES:
        raise ValueError(
            f"masks and scores of {owner} must be of flax_mha, got {name}, whose heads are not "
            f"known; write it as masks.Predicate or scores.Score"
        )
    if isinstance(x, scores.Alibi) and x.slopes is None:
        x = x.replace(slopes=scores.alibi_slopes(count))
    arrays = {field: (getattr(x, field), axis) for field, axis in _AXES[type(x)].items()}
    return x.replace(**{
        field: take(array, index, axis)
        for field, (array, axis) in arrays.items()
        if np.ndim(array) >= -axis and np.shape(array)[axis] > 1
    })  # fmt: skip


def _renumbered(x: Any, index: np.ndarray) -> Any:
    """Return a user-defined mask or score whose function gets the heads' earlier numbers."""
    fn, at = x.fn, 2 if isinstance(x, scores.Score) else 1

    def of_heads(*args: Any) -> Any:
        return fn(*args[:at], args[-1][args[at]], *args[at + 1 : -1])

    return x.replace(fn=of_heads, args=(*x.args, jax.numpy.asarray(index)))
