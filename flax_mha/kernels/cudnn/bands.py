"""The masks that cuDNN supports: a band along the diagonal, within lengths and runs.

Other masks hide pairs within the band by a bias.

Runs are packed documents in cuDNN's ragged layout, where pairs of different documents cost nothing.
They need Hopper, heads of at most 128 features, the same tokens as queries and keys, in order, and
no bias: `Documents`, and `Segments` in contiguous runs, of static ids or with `runs` and `at_most`.
The lse takes runs·B·N·T·4 bytes while the kernel runs.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha.base.coordinates import Array, flat_batch, tiles_of
from flax_mha.base.shapes import Dims
from flax_mha.kernels.call.mask_parts import MaskParts, conjuncts
from flax_mha.kernels.call.spec import AttentionSpec
from flax_mha.masks import FULL, Causal, Mask, Segments, Window
from flax_mha.masks.states import is_static


class Band(struct.PyTreeNode):
    """A band: query i < q sees keys j < k of its run with i − left ≤ j ≤ i.

    Attributes:
      q: the number of queries, int32 [rows|1].
      k: the number of keys, int32 [rows|1].
      causal: True if j ≤ i holds.
      left: the number of earlier keys that a query sees, only with `causal`; None for all.
      full: True if q is T and k is S, and each query sees a key of its run.
      runs: the packed documents; None for one document per row.
    """

    q: Any
    k: Any
    causal: bool = struct.field(pytree_node=False)
    left: int | None = struct.field(pytree_node=False)
    full: bool = struct.field(pytree_node=False)
    runs: "Runs | None" = None

    @property
    def may_be_empty(self) -> bool:
        """False if each query is known to see a key."""
        return not self.full or (self.runs is not None and self.runs.rest)

    def operands(self) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Return cuDNN's lengths of queries and keys, at least 1, and the offsets of runs."""
        if self.runs is None:
            # `edge_cases` sets the outputs of rows of length 0.
            return jnp.maximum(self.q, 1), jnp.maximum(self.k, 1), None
        return self.runs.lengths(self.q), self.runs.lengths(self.k), self.runs.offsets()

    def empty(self, T: int, S: int) -> jax.Array:
        """Return True for queries that see no key, bool [rows|1, T]."""
        i = jnp.arange(T, dtype=jnp.int32)[None]
        k = self.k[:, None]
        start = 0 if self.left is None else jnp.clip(i - self.left, 0, S)
        end = jnp.minimum(k, i + 1) if self.causal else k
        is_empty = i >= self.q[:, None]
        if self.runs is not None:
            first, last = self.runs.bounds()
            start, end = jnp.maximum(start, first), jnp.minimum(end, last)
            if self.runs.rest:
                is_empty |= self.runs.index == self.runs.most - 1
        return is_empty | (end <= start)


def lower(spec: AttentionSpec, dims: Dims, takes_runs: bool) -> tuple[Band, Mask | None]:
    """Split the call's mask into a band, and a mask that hides other pairs within it, or None.

    `takes_runs` is False if packed documents are left to the second mask.
    """
    at = spec.at(dims)
    masks = [x for x in conjuncts(spec.mask) if not _allows_all(x, at.q, at.k, dims)]
    parts = MaskParts.of(masks)
    q0, k0 = _first(at.q), _first(at.k)
    native: list[Mask] = []
    causal, left = False, None
    if q0 is not None and k0 is not None and (limits := _limits(parts.band, q0 - k0, dims)):
        causal, left = limits
        native += parts.band
    lengths = [x for x in parts.lengths if k0 is not None and (q0 is not None or x.q is None)]
    native += lengths
    runs = None
    # A bias excludes runs.
    is_alone = len(parts.segments) == len(masks) - len(native) == 1
    if takes_runs and is_alone and q0 is not None and (dims.T, q0) == (dims.S, k0):
        runs = _find_runs(parts.segments[0], dims)
        native += parts.segments if runs else ()
    hidden = [x for x in masks if not any(x is other for other in native)]
    q = _min_length([x.q.array - q0 for x in lengths if x.q is not None], dims.T, dims)
    k = _min_length([x.kv.array - k0 for x in lengths], dims.S, dims)
    full = not lengths and (left is None or dims.T <= dims.S)
    return Band(q, k, causal, left, full, runs), (
        functools.reduce(operator.and_, hidden) if hidden else None
    )


def _limits(
    band: Sequence[Causal | Window], shift: int, dims: Dims
) -> tuple[bool, int | None] | None:
    """Return `causal` and `left` of a `Band`, or None if cuDNN has no such band.

    Query i has position i + shift, where key j has position j.
    """
    lefts: list[Any] = [x.left for x in band if isinstance(x, Window)]
    rights: list[Any] = [x.right if isinstance(x, Window) else 0 for x in band]
    left = min((x - shift for x in lefts if x is not None), default=dims.T)
    right = min((x + shift for x in rights if x is not None), default=dims.S)
    sees_before = left >= dims.T - 1
    if right == 0:
        return True, None if sees_before else left
    # A window needs a right end.
    return (False, None) if sees_before and right >= dims.S - 1 else None


def _find_runs(mask: Segments, dims: Dims) -> "Runs | None":
    """Return the runs of a mask, or None if their number is not known."""
    if not mask.runs or mask.at_most is None:
        return None
    rest = not is_static(mask.q.array)
    index = jnp.asarray(flat_batch(mask.q.array, dims), jnp.int32).reshape(-1, dims.T)
    return Runs(jnp.minimum(index, mask.at_most), mask.at_most + rest, rest)


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
    """The runs of consecutive tokens in rows of T tokens, the same for queries and keys.

    Attributes:
      index: the run of each token, int32 [rows|1, T], 0 … most − 1.
      most: the maximum number of runs of a row, at least 2, because JAX has no ragged layout for 1.
      rest: True if the last run holds the tokens beyond `at_most` runs. They see no key, but cuDNN
        writes results only for tokens of runs.
    """

    index: Any
    most: int = struct.field(pytree_node=False)
    rest: bool = struct.field(pytree_node=False)

    def starts(self) -> jax.Array:
        """Return the start of each run, and the end of the last, int32 [rows|1, most + 1]."""
        numbers = jnp.arange(self.most + 1, dtype=jnp.int32)
        before = self.index[:, None] < numbers[None, :, None]
        return before.sum(-1, dtype=jnp.int32)

    def bounds(self) -> tuple[jax.Array, jax.Array]:
        """Return the start and end of each token's run, int32 [rows|1, T]."""
        starts = self.starts()
        begin, end = (jnp.take_along_axis(starts, self.index + i, 1) for i in (0, 1))
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

        return jax.vmap(row)(by_run, self.index, local)

    def by_run(self, lse: jax.Array) -> jax.Array:
        """Scatter [rows, N, T] to [rows, most, N, T], with arbitrary values beyond a run's end."""
        T = lse.shape[-1]
        of_row = self.starts()[:, :-1, None] + jnp.arange(T, dtype=jnp.int32)[None, None]
        of_row = jnp.minimum(of_row, T - 1)
        return jnp.take_along_axis(lse[:, None], of_row[:, :, None], -1)
