"""The masks that cuDNN supports: a band along the diagonal, within lengths and runs.

Other masks hide pairs within the band by a bias.
"""

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha.base.coordinates import Array, At, flat_batch, tiles_of
from flax_mha.base.shapes import Dims
from flax_mha.kernels.call.mask_parts import MaskParts, conjuncts
from flax_mha.kernels.call.spec import AttentionSpec
from flax_mha.masks import FULL, Causal, Mask, Segments, Window
from flax_mha.masks.states import is_static


class Band(struct.PyTreeNode):
    """A band: query i < q sees keys j < k of its run with i − left ≤ j ≤ i.

    Attributes:
      q: the number of queries, int32 [rows|1], 0 … T.
      k: the number of keys, int32 [rows|1], 0 … S.
      causal: True if the rule j ≤ i applies.
      left: the number of earlier keys that a query sees, only with `causal`; None for all.
      sees: True if each query is known to see a key.
      runs: the packed documents; None for one document per row.
    """

    q: Any
    k: Any
    causal: bool = struct.field(pytree_node=False)
    left: int | None = struct.field(pytree_node=False)
    sees: bool = struct.field(pytree_node=False)
    runs: "Runs | None" = None

    def operands(self) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Return cuDNN's lengths of queries and keys, at least 1, and the offsets of runs."""
        if self.runs is None:
            # `edge_cases` sets the outputs of rows of length 0.
            return jnp.maximum(self.q, 1), jnp.maximum(self.k, 1), None
        return self.runs.lengths(self.q), self.runs.lengths(self.k), self.runs.offsets()

    def keys(self, T: int, S: int) -> tuple[jax.Array, jax.Array]:
        """Return the first key that each query sees, and the end, int32 [rows|1, T]."""
        i = jnp.arange(T, dtype=jnp.int32)[None]
        k = self.k[:, None]
        end = jnp.minimum(k, i + 1) if self.causal else jnp.broadcast_to(k, (len(self.k), T))
        start = jnp.zeros_like(i) if self.left is None else jnp.clip(i - self.left, 0, S)
        start, end = self._clip_to_run(start, end)
        return start, jnp.where(i < self.q[:, None], end, 0)

    def queries(self, T: int, S: int) -> tuple[jax.Array, jax.Array]:
        """Return the first query that sees each key, and the end, int32 [rows|1, S]."""
        j = jnp.arange(S, dtype=jnp.int32)[None]
        q = jnp.minimum(self.q, T)[:, None]
        end = jnp.broadcast_to(q, (len(self.q), S))
        if self.left is not None:
            end = jnp.minimum(q, j + self.left + 1)
        start = jnp.minimum(j, T) if self.causal else jnp.zeros_like(j)
        start, end = self._clip_to_run(start, end)
        return start, jnp.where(j < self.k[:, None], end, 0)

    def _clip_to_run(self, start: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
        if self.runs is None:
            return start, end
        first, last = self.runs.bounds()
        return jnp.maximum(start, first), jnp.minimum(end, last)


def lower(spec: AttentionSpec, dims: Dims, takes_runs: bool) -> tuple[Band, Mask | None]:
    """Split the call's mask into a band, and a mask that hides other pairs within it, or None.

    `takes_runs` is False if packed documents are left to the second mask.
    """
    at = spec.at(dims)
    masks = [x for x in conjuncts(spec.mask) if not _allows_all(x, at.q, at.k, dims)]
    band = _band(masks, at, dims)
    if band is not None and (band.runs is None or takes_runs):
        return band, None
    bands = [_band([mask], at, dims) for mask in masks]
    is_native = [band is not None and band.runs is None for band in bands]
    native: Any = _band([*itertools.compress(masks, is_native)], at, dims)
    others = [mask for mask, left_out in zip(masks, is_native, strict=True) if not left_out]
    return native, functools.reduce(operator.and_, others)


def _band(masks: Sequence[Mask], at: At, dims: Dims) -> Band | None:
    """Return the masks, joined by `&`, as a band, or None if they are not one."""
    parts = MaskParts.of(masks)
    lengths, packed, positional = parts.lengths, parts.segments, _Reach.of(parts.band)
    reads_both = positional != _Reach() or bool(packed)
    reads_q = reads_both or any(mask.q is not None for mask in lengths)
    first_q, first_k = _first(at.q), _first(at.k)
    q0, k0 = first_q or 0, first_k or 0
    reach = positional.shift(q0 - k0, dims)
    is_causal = reach.right == 0
    if (
        (parts.others or parts.queries or parts.keys or len(packed) > 1)
        or any(not mask.runs or mask.at_most is None for mask in packed)
        or (first_q is None and reads_q)
        or (first_k is None and (reads_both or lengths))
        or (not is_causal and reach != _Reach())
        or (packed and (dims.T, q0) != (dims.S, k0))
    ):
        return None
    q = _min_length([mask.q.array - q0 for mask in lengths if mask.q is not None], dims.T, dims)
    k = _min_length([mask.kv.array - k0 for mask in lengths], dims.S, dims)
    runs = _find_runs(packed, dims)
    sees = not lengths and runs is None and (reach.left is None or dims.T <= dims.S)
    return Band(q, k, is_causal, reach.left, sees, runs)


class _Reach(NamedTuple):
    """The numbers of keys that a query sees before and after itself (None: all)."""

    left: int | None = None
    right: int | None = None

    @classmethod
    def of(cls, band: Sequence[Causal | Window]) -> "_Reach":
        """Return the smallest limits of some masks."""
        left: list[Any] = [mask.left for mask in band if isinstance(mask, Window)]
        right: list[Any] = [mask.right if isinstance(mask, Window) else 0 for mask in band]
        least = (min((x for x in side if x is not None), default=None) for side in (left, right))
        return cls(*least)

    def shift(self, by: int, dims: Dims) -> "_Reach":
        """Return the limits in indices, after a shift of query positions, None if idle."""
        left = None if self.left is None else self.left - by
        right = None if self.right is None else self.right + by
        left = None if left is None or left >= dims.T - 1 else left
        # A window needs a right end.
        is_idle = right is None or (left is None and right >= dims.S - 1)
        return _Reach(left, None if is_idle else right)


def _find_runs(packed: Sequence[Segments], dims: Dims) -> "Runs | None":
    """Return the runs of a mask that may have more than one."""
    most = packed[0].at_most if packed else None
    if most in (None, 1):
        return None
    index = jnp.asarray(flat_batch(packed[0].q.array, dims), jnp.int32)
    return Runs(index.reshape(-1, dims.T), most)


def _allows_all(mask: Mask, q: Array, k: Array, dims: Dims) -> bool:
    """Return True if a static mask allows everything."""
    if not is_static(q, k):
        return False
    states = mask.tiles(tiles_of(q, k, dims.T, dims.S))
    return is_static(states) and bool((np.asarray(states) == FULL).all())


def _first(x: Array) -> int | None:
    """Return the first position, if the positions of all rows are static and count up from it."""
    if not is_static(x):
        return None
    rows = np.asarray(x).reshape(-1, max(x.shape[-2:]))
    first = int(rows[0, 0])
    return first if (rows == first + np.arange(rows.shape[1])).all() else None


def _min_length(lengths: list[Array], most: int, dims: Dims) -> jax.Array:
    """Return the minimum of lengths [*B|1, 1, 1, 1] and `most`, int32 [rows|1]."""
    least = jnp.full(1, most, jnp.int32)
    for x in lengths:
        least = jnp.minimum(least, jnp.asarray(flat_batch(x, dims), jnp.int32).reshape(-1))
    return jnp.maximum(least, 0)


class Runs(struct.PyTreeNode):
    """The runs of consecutive tokens in rows of T tokens, for queries and keys alike.

    Attributes:
      index: the run of each token, int32 [rows|1, T], from 0; `most` or more for no run.
      most: the maximum number of runs of a row, at least 2. JAX uses no ragged layout for 1.
    """

    index: Any
    most: int = struct.field(pytree_node=False)

    def starts(self) -> jax.Array:
        """Return the start of each run, and the end of the last, int32 [rows|1, most + 1]."""
        numbers = jnp.arange(self.most + 1, dtype=jnp.int32)
        before = self.index[:, None] < numbers[None, :, None]
        return before.sum(-1, dtype=jnp.int32)

    def bounds(self) -> tuple[jax.Array, jax.Array]:
        """Return the start and end of each token's run, int32 [rows|1, T], equal if it has none."""
        starts = self.starts()
        begin, end = (
            jnp.take_along_axis(starts, jnp.minimum(self.index + i, self.most), 1) for i in (0, 1)
        )
        return begin, end

    def lengths(self, limit: jax.Array) -> jax.Array:
        """Count each run's tokens before a limit [rows], [rows, most], at least 1 if it has any."""
        starts = self.starts()
        sizes = starts[:, 1:] - starts[:, :-1]
        least = jnp.minimum(sizes, 1)
        return jnp.clip(limit[:, None] - starts[:, :-1], least, sizes)

    def offsets(self) -> jax.Array:
        """Return the start of each run in JAX's form, int32 [rows, most + 1], −1 for no run."""
        return self.starts().at[:, -1].set(-1)

    def lse(self, by_run: jax.Array) -> jax.Array:
        """Gather an lse [rows, N, T] from cuDNN's [rows, most, N, T]."""
        begin, _ = self.bounds()
        local = jnp.arange(self.index.shape[1], dtype=jnp.int32)[None] - begin

        def row(by_run: jax.Array, index: jax.Array, local: jax.Array) -> jax.Array:
            return by_run[index, :, local].T

        return jax.vmap(row)(by_run, jnp.minimum(self.index, self.most - 1), local)

    def by_run(self, lse: jax.Array) -> jax.Array:
        """Scatter [rows, N, T] to [rows, most, N, T], with arbitrary values beyond a run's end."""
        T = lse.shape[-1]
        of_row = self.starts()[:, :-1, None] + jnp.arange(T, dtype=jnp.int32)[None, None]
        of_row = jnp.minimum(of_row, T - 1)
        return jnp.take_along_axis(lse[:, None], of_row[:, :, None], -1)
