"""The heads that layers keep, and their parts of arrays, masks and scores."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta

from flax_mha import masks, scores, sharding
from flax_mha.base import checks

# The axis of heads, counted from the end, of the arrays in masks and scores.
_AXES: dict[type, dict[str, int]] = {
    masks.Dense: {"array": -3}, masks.BlockSparse: {"blocks": -3}, scores.Bias: {"array": -3},
    scores.Alibi: {"slopes": -1}, scores.RelativeBias: {"table": -2},
    scores.Relative: {},
    scores.TransformerXL: {"content_bias": -2, "position_bias": -2, "kernel": -2},
    masks.AtLeast: {}, masks.Causal: {}, masks.Dilated: {}, masks.Documents: {}, masks.Keys: {},
    masks.Lengths: {}, masks.Neighborhood: {}, masks.Segments: {},
    masks.Window: {}, scores.SoftCap: {},
}  # fmt: skip


@dataclasses.dataclass
class Kept:
    """The heads that a layer keeps, or that each of several layers keeps.

    Attributes:
      owner: the path of the layer or of the stack.
      rows: int [K', G'] for each layer, the query heads that read each key/value head.
      N, K, H: the layer's sizes before.
      count: the heads of the scores, r·N: r·K key/value heads in a row, each read by N/K in a row.
      layers: the sizes of the axes of layers; none for one layer.
    """

    owner: str
    rows: Sequence[np.ndarray]
    N: int
    K: int
    H: int
    count: int
    layers: Sequence[int] = ()

    def index(self, size: int, is_kv: bool = False) -> np.ndarray:
        """Return the indices [*layers, n] along an axis of r·N heads, or of r·K if `is_kv`."""
        k, g = np.divmod(np.stack(self.rows), self.N // self.K)
        axis = np.arange(size).reshape(self.K, -1, 1 if is_kv else self.N // self.K)
        index = axis[k[..., 0], :, 0] if is_kv else np.moveaxis(axis[k, :, g], -1, -2)
        return index.reshape(*self.layers, -1)

    def take(self, x: Any, names: Sequence[str | None]) -> Any:
        """Return the part of an array, perhaps boxed, whose last axes have logical names."""
        for axis, name in enumerate(names, -len(names)):
            if name in ("heads", "kv_heads"):
                index = self.index(np.shape(meta.unbox(x))[axis], name == "kv_heads")
                x = jax.tree.map(functools.partial(_take, index=index, axis=axis), x)
        return x

    def shared(self, name: str) -> "Kept":
        """Return the heads of any layer, after a check that all layers agree."""
        if not all(np.array_equal(row, self.rows[0]) for row in self.rows):
            raise ValueError(
                f"layers that share {name} in {self.owner} must lose the same heads; remove the "
                f"same from each, or give each layer its own"
            )
        return dataclasses.replace(self, rows=self.rows[:1], layers=())

    def select(self, tree: Any) -> Any:
        """Return masks and scores for these heads."""

        def is_leaf(x: Any) -> bool:
            is_joined = isinstance(x, masks.And | masks.Or | masks.Not)
            return isinstance(x, masks.Mask | scores.ScoreMod) and not is_joined

        return jax.tree.map(self._select, tree, is_leaf=is_leaf)

    def _select(self, x: Any) -> Any:
        name = type(x).__name__
        if isinstance(x, masks.PerHead):
            index = self.shared(name).index(self.count)
            return x.replace(masks=tuple(self.select(masks.as_mask(x.masks[i])) for i in index))
        if isinstance(x, masks.Predicate | scores.Score):
            return _renumbered(x, self.shared(name).index(self.count))
        if type(x) not in _AXES:
            raise ValueError(
                f"masks and scores of {self.owner} must be of flax_mha, got {name}, whose heads "
                f"are not known; write it as masks.Predicate or scores.Score"
            )
        # Defaults of the number of heads would change with it.
        if isinstance(x, scores.Alibi) and x.slopes is None:
            x = x.replace(slopes=scores.alibi_slopes(self.count))
        if isinstance(x, scores.TransformerXL):
            x = x.replace(features=x.features or self.count * self.H)
        for field, axis in _AXES[type(x)].items():
            array = getattr(x, field)
            if np.ndim(array) >= -axis and np.shape(array)[axis] > 1:
                index = self.shared(name).index(self.count)
                x = x.replace(**{field: _take(array, index, axis)})
        return x


def keep(
    owner: str, removed: Any, N: int, K: int, layers: Sequence[int], repeat_kv: bool
) -> list[np.ndarray]:
    """Return `Kept.rows` without the heads `removed`, perhaps a dict by layer.

    With `repeat_kv` several rows may be of one key/value head.
    """
    steps = range(math.prod(layers))
    by_step = removed if isinstance(removed, Mapping) else dict.fromkeys(steps, removed)
    is_kept = np.ones((len(steps), N), bool)
    for step, heads in by_step.items():
        indices = [*checks.sizes(f"heads of {owner}", heads)]
        if step not in steps or max(indices, default=0) >= N:
            raise ValueError(
                f"heads of {owner} must be in 0 … {N - 1}, and layers in 0 … {steps[-1]}, got "
                f"heads {indices} of layer {step}; change them"
            )
        is_kept[step, indices] = False
    counts = is_kept.sum(1)
    if len({*counts.tolist()}) > 1 or not counts[0]:
        raise ValueError(
            f"{owner} must keep a head, and as many in each layer under scan, got "
            f"{counts.tolist()}; remove fewer, or unstack the layers and set scan=False"
        )
    groups = {*is_kept.reshape(len(steps), K, -1).sum(-1).ravel().tolist()} - {0}
    if len(groups) > 1 and not repeat_kv:
        raise ValueError(
            f"key/value heads of {owner} must keep as many query heads each, or none, got "
            f"{sorted(groups)}; give repeat_kv=True to repeat keys and values"
        )
    return [np.flatnonzero(row).reshape(-1, math.gcd(*groups)) for row in is_kept]


def _take(x: Any, index: np.ndarray, axis: int) -> Any:
    """Return entries along an axis of x, counted from the end, by their index [*layers, n]."""
    *layers, n = index.shape
    before, after = x.ndim + axis - len(layers), -axis - 1
    index = index.reshape(*layers, *[1] * before, n, *[1] * after)
    if isinstance(x, np.ndarray):
        return np.take_along_axis(x, index, axis)  # It stays static.
    with jax.sharding.use_abstract_mesh(jax.typeof(x).sharding.mesh):
        return sharding.auto(lambda x: jnp.take_along_axis(x, index, axis), (), x)


def _renumbered(x: Any, index: np.ndarray) -> Any:
    """Return a user's mask or score, whose function gets the heads' earlier numbers."""
    fn, at = x.fn, 2 if isinstance(x, scores.Score) else 1

    def of_heads(*args: Any) -> Any:
        return fn(*args[:at], args[-1][args[at]], *args[at + 1 : -1])

    return x.replace(fn=of_heads, args=(*x.args, jnp.asarray(index)))
