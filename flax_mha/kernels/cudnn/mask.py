"""Masks that are a band along the diagonal, within lengths and runs: those cuDNN takes natively."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha.base.coordinates import Array, flat_batch, tiles_of
from flax_mha.base.shapes import Dims
from flax_mha.kernels.mask_parts import conjuncts
from flax_mha.kernels.spec import AttentionSpec
from flax_mha.masks import FULL, Causal, Lengths, Mask, Segments, Window
from flax_mha.masks.tiles import is_static

_OF_RUNS = (
    " (for packed documents leave them out: masks count tokens in the order given, and positions "
    "that begin anew in each document are for rotary, a layer's `positions`)"
)


class Band(struct.PyTreeNode):
    """The query of index i < q sees the keys of indices j < k, i − left ≤ j ≤ i, of its own run.

    Attributes:
      q: int32 [rows|1], 0 … T.
      k: int32 [rows|1], 0 … S.
      causal: whether j ≤ i is asked at all.
      left: how far back; None for all. Asked only with `causal`.
      runs: of packed documents; None for one document a row.
    """

    q: Any
    k: Any
    causal: bool = struct.field(pytree_node=False)
    left: int | None = struct.field(pytree_node=False)
    runs: "Runs | None" = None

    def operands(self) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """The lengths of queries and keys for cuDNN, at least 1, and where runs begin."""
        if self.runs is None:
            # Rows without any are settled by us.
            return jnp.maximum(self.q, 1), jnp.maximum(self.k, 1), None
        return self.runs.lengths(self.q), self.runs.lengths(self.k), self.runs.offsets()

    def keys(self, T: int, S: int) -> tuple[jax.Array, jax.Array]:
        """The first key that each query sees and the one after the last, int32 [rows|1, T]."""
        i = jnp.arange(T, dtype=jnp.int32)[None]
        k = self.k[:, None]
        end = jnp.minimum(k, i + 1) if self.causal else jnp.broadcast_to(k, (len(self.k), T))
        start = jnp.zeros_like(i) if self.left is None else jnp.clip(i - self.left, 0, S)
        start, end = self._of_run(start, end)
        return start, jnp.where(i < self.q[:, None], end, 0)

    def queries(self, T: int, S: int) -> tuple[jax.Array, jax.Array]:
        """The first query that sees each key and the one after the last, int32 [rows|1, S]."""
        j = jnp.arange(S, dtype=jnp.int32)[None]
        q = jnp.minimum(self.q, T)[:, None]
        end = jnp.broadcast_to(q, (len(self.q), S))
        if self.left is not None:
            end = jnp.minimum(q, j + self.left + 1)
        start = jnp.minimum(j, T) if self.causal else jnp.zeros_like(j)
        start, end = self._of_run(start, end)
        return start, jnp.where(j < self.k[:, None], end, 0)

    def _of_run(self, start: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
        if self.runs is None:
            return start, end
        first, last = self.runs.bounds()
        return jnp.maximum(start, first), jnp.minimum(end, last)


def any_between(flags: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
    """Whether any flag [rows, L, n] is set at start ≤ index < end [rows|1, M]: bool [rows, M, n].

    By sums of the flags before each index: O(L + M).
    """
    before = jnp.pad(jnp.cumsum(flags, 1, jnp.int32), ((0, 0), (1, 0), (0, 0)))
    rows = len(flags)

    def until(index: jax.Array) -> jax.Array:
        index = jnp.broadcast_to(index, (rows, index.shape[1]))
        return jnp.take_along_axis(before, index[..., None], 1)

    return until(end) > until(start)


def lower(spec: AttentionSpec, dims: Dims) -> Band | str:
    """The call's mask as a band, or the reason why it is none."""
    at = spec.at(dims)
    reach = _Reach(None, None)
    lengths: list[Lengths] = []
    packed: list[Segments] = []
    for mask in conjuncts(spec.mask):
        if _allows_all(mask, at.q, at.k, dims):
            continue
        # A subclass may mean something else.
        if type(mask) is Causal:
            reach = reach.within(_Reach(None, 0))
        elif type(mask) is Window:
            reach = reach.within(_Reach(mask.left, mask.right))
        elif type(mask) is Lengths and mask.kv.array.shape[-2] == 1:
            lengths.append(mask)
        elif type(mask) is Segments and mask.runs and not packed:
            if mask.at_most is None:
                return "needs at_most of Segments in runs: memory for each of them"
            packed.append(mask)
        else:
            return (
                f"takes Causal, Window, Lengths and one Segments of runs joined by &, "
                f"got {_name(mask)}"
            )
    first = [_first(x) for x in (at.q, at.k)]
    banded = reach != _Reach(None, None)
    of_pairs = banded or bool(packed)
    for name, x, asked in (
        ("q_positions", first[0], of_pairs or any(mask.q is not None for mask in lengths)),
        ("kv_positions", first[1], of_pairs or bool(lengths)),
    ):
        if asked and x is None:
            reason = f"{name} do not count from one number that is known before tracing"
            return reason + (_OF_RUNS if packed else "")
    q0, k0 = (x or 0 for x in first)
    reach = reach.shifted(q0 - k0, dims)
    if reach.right not in (None, 0) or (reach.right is None and reach.left is not None):
        return (
            f"takes windows that end at the query's own index, 0 … {dims.T - 1}, here they reach "
            f"{_signed(reach.left, 'back')} and {_signed(reach.right, 'ahead')}"
        )
    if packed and (dims.T, q0) != (dims.S, k0):
        return "takes runs of tokens that are queries and keys alike, from one position on"
    q = _least([mask.q.array - q0 for mask in lengths if mask.q is not None], dims.T, dims)
    k = _least([mask.kv.array - k0 for mask in lengths], dims.S, dims)
    return Band(q, k, reach.right == 0, reach.left, _runs(packed, dims))


class _Reach(NamedTuple):
    """How far a query sees before and after itself; None for no limit."""

    left: int | None
    right: int | None

    def within(self, other: "_Reach") -> "_Reach":
        """The nearer limits of both."""
        near = (
            min((x for x in pair if x is not None), default=None)
            for pair in zip(self, other, strict=True)
        )
        return _Reach(*near)

    def shifted(self, by: int, dims: Dims) -> "_Reach":
        """In indices, where positions of queries are ahead by so many; without idle limits."""
        left = None if self.left is None else self.left - by
        right = None if self.right is None else self.right + by
        left = None if left is None or left >= dims.T - 1 else left
        # A window has to end somewhere.
        idle = right is None or (left is None and right >= dims.S - 1)
        return _Reach(left, None if idle else right)


def _runs(packed: list[Segments], dims: Dims) -> "Runs | None":
    """Those of a mask that may have more than one."""
    most = packed[0].at_most if packed else None
    if most in (None, 1):
        return None
    index = jnp.asarray(flat_batch(packed[0].q.array, dims), jnp.int32)
    return Runs(index.reshape(-1, dims.T), most)


def _allows_all(mask: Mask, q: Array, k: Array, dims: Dims) -> bool:
    """Whether it is known before tracing that a mask allows everything."""
    if not is_static(q, k):
        return False
    verdict = mask.tiles(tiles_of(q, k, dims.T, dims.S))
    return is_static(verdict) and bool((np.asarray(verdict) == FULL).all())


def _first(x: Array) -> int | None:
    """The first position, where those of every row are known and count on from it."""
    if not is_static(x):
        return None
    rows = np.asarray(x).reshape(-1, max(x.shape[-2:]))
    first = int(rows[0, 0])
    return first if (rows == first + np.arange(rows.shape[1])).all() else None


def _least(lengths: list[Array], most: int, dims: Dims) -> jax.Array:
    """The smallest of lengths [*B|1, 1, 1, 1] and `most`, int32 [rows|1]."""
    least = jnp.full(1, most, jnp.int32)
    for x in lengths:
        least = jnp.minimum(least, jnp.asarray(flat_batch(x, dims), jnp.int32).reshape(-1))
    return jnp.maximum(least, 0)


def _name(mask: Mask) -> str:
    """What a mask is called, and why it is not taken, where others of its kind are."""
    of_kind = {
        Lengths: " of each query",
        Segments: ", not known to be runs (say runs=True, or give Documents)",
    }
    return type(mask).__name__ + of_kind.get(type(mask), "")


def _signed(reach: int | None, where: str) -> str:
    return f"without end {where}" if reach is None else f"{reach} {where}"


class Runs(struct.PyTreeNode):
    """The runs of rows of T tokens, for queries and keys alike.

    Attributes:
      index: int32 [rows|1, T], which run each token is of, 0, 1, …; tokens from `most` on are of
        none.
      most: how many a row has at most, 2 at least: JAX takes one for no ragged layout.
    """

    index: Any
    most: int = struct.field(pytree_node=False)

    def starts(self) -> jax.Array:
        """Where each run begins, and the last one ends, int32 [rows|1, most + 1]."""
        numbers = jnp.arange(self.most + 1, dtype=jnp.int32)
        before = self.index[:, None] < numbers[None, :, None]
        return before.sum(-1, dtype=jnp.int32)

    def bounds(self) -> tuple[jax.Array, jax.Array]:
        """Where each token's run begins, and ends, int32 [rows|1, T]; alike where it has none."""
        starts = self.starts()
        begin, end = (
            jnp.take_along_axis(starts, jnp.minimum(self.index + i, self.most), 1) for i in (0, 1)
        )
        return begin, end

    def lengths(self, limit: jax.Array) -> jax.Array:
        """How many tokens of each run stand before limit [rows], and one at least, [rows, most].

        Where there are none, and the run has some, the rows are settled by us.
        """
        starts = self.starts()
        sizes = starts[:, 1:] - starts[:, :-1]
        least = jnp.minimum(sizes, 1)
        return jnp.clip(limit[:, None] - starts[:, :-1], least, sizes)

    def offsets(self) -> jax.Array:
        """As JAX takes them, int32 [rows, most + 1]: where each run begins, then −1 for nothing."""
        return self.starts().at[:, -1].set(-1)

    def lse(self, by_run: jax.Array) -> jax.Array:
        """[rows, N, T] of cuDNN's [rows, most, N, T]."""
        begin, _ = self.bounds()
        local = jnp.arange(self.index.shape[1], dtype=jnp.int32)[None] - begin

        def row(by_run: jax.Array, index: jax.Array, local: jax.Array) -> jax.Array:
            return by_run[index, :, local].T

        return jax.vmap(row)(by_run, jnp.minimum(self.index, self.most - 1), local)

    def by_run(self, lse: jax.Array) -> jax.Array:
        """[rows, most, N, T] of [rows, N, T]; behind a run's end stands anything."""
        T = lse.shape[-1]
        of_row = self.starts()[:, :-1, None] + jnp.arange(T, dtype=jnp.int32)[None, None]
        of_row = jnp.minimum(of_row, T - 1)
        return jnp.take_along_axis(lse[:, None], of_row[:, :, None], -1)
