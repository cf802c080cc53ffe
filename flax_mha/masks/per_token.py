"""Masks that hold something of each row of the batch, or of each token."""

from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import Array, At, ScoreArray, Tiles
from flax_mha.base.shapes import Dims
from flax_mha.masks.base import Dense, Mask, PositionDependent
from flax_mha.masks.positional import Causal
from flax_mha.masks.tiles import both, either, is_static, tile_state


class Lengths(Mask):
    """Only the first `kv` keys are real: j < kv.

    Attributes:
      kv: int, [*B], or [*B, T] for a length per query (the `valid_lens` of d2l).
      q: int [*B] or None. Queries at positions i ≥ q see nothing, so their output is 0.
    """

    kv: Any
    q: Any = None

    def bind(self, dims: Dims) -> Self:
        q = None if self.q is None else _per_row("Lengths.q", self.q, dims)
        return self.replace(kv=_per_row("Lengths.kv", self.kv, dims, per_query=True), q=q)

    def allowed(self, at: At) -> Array:
        allowed = at.k < self.kv.array
        return allowed if self.q is None else allowed & (at.q < self.q.array)

    def tiles(self, tiles: Tiles) -> Array:
        low, high = tiles.least(self.kv.array), tiles.greatest(self.kv.array)
        verdict = tile_state(tiles.k_min < high, tiles.k_max < low)
        if self.q is None:
            return verdict
        q = self.q.array
        return both(verdict, tile_state(tiles.q_min < q, tiles.q_max < q))


class Keys(Mask):
    """Only the keys that an array names are seen: those of tokens that are no padding, say.

    Attributes:
      real: bool [*B, S] (or [S]), True where a key may be seen. (PyTorch's `key_padding_mask` is
        True where it may not: give `~key_padding_mask`.)
    """

    real: Any

    def bind(self, dims: Dims) -> Mask:
        real = checks.array("Keys.real", self.real)
        if real.shape not in {(dims.S,), (*dims.B, dims.S)}:
            raise ValueError(
                f"Keys.real must have shape [S] = {(dims.S,)} or [*B, S] = {(*dims.B, dims.S)}, "
                f"got {real.shape}; say of each key whether it may be seen"
            )
        return Dense(real[..., None, None, :]).bind(dims)


class Segments(Mask):
    """Tokens see those of their own segment: packed documents, images, padding as one of its own.

    Attributes:
      q: int [*B, T] (or [T]), the segment of each query.
      kv: int [*B, S] (or [S]), the segment of each key (default: q).
      runs: True if the tokens of a segment stand together, one segment after another. An id that
        comes again after others is then a new segment; `kv` is q. Some kernels take runs alone;
        of ids that are known before tracing they see by themselves whether they are.
      at_most: the most runs of a row, for kernels whose memory grows with it. The outputs of
        queries in later ones are NaN.
      invalid: of a bound mask, where those are: bool [*B|1, 1, T, 1]; None if there are none.
    """

    q: Any
    kv: Any = None
    runs: bool = struct.field(pytree_node=False, default=False)
    at_most: int | None = struct.field(pytree_node=False, default=None)
    invalid: Any = None

    def bind(self, dims: Dims) -> Self:
        q = shapes.per_token("Segments.q", self.q, (*dims.B, dims.T))
        kv = self.q if self.kv is None else self.kv
        kv = shapes.per_token("Segments.kv", kv, (*dims.B, dims.S), "S")
        q, kv = (shapes.lead(ids, len(dims.B) + 1) for ids in (q, kv))
        if self.runs or self.at_most is not None:
            self._check()
            q = kv = _runs(q)
            bound = self._bounded(q)
        elif most := _count_runs(q, kv):
            q = kv = _runs(q)
            bound = self.replace(runs=True, at_most=most)
        else:
            bound = self
        return bound.replace(
            q=ScoreArray(q[..., None, :, None]), kv=ScoreArray(kv[..., None, None, :])
        )

    def _check(self) -> None:
        if self.at_most is not None:
            checks.positive(**{"Segments.at_most": self.at_most})
        if not self.runs:
            raise ValueError("Segments.at_most counts runs, got runs=False; give runs=True")
        if self.kv is not None:
            raise ValueError(
                "Segments.runs is of tokens that are queries and keys alike, got kv; leave kv out"
            )

    def _bounded(self, index: Array) -> Self:
        """Add the number of runs, if it is known; else mark queries of runs beyond at_most."""
        count = int(index.max(initial=0)) + 1 if is_static(index) else None
        most = self.at_most or count
        if most is None:
            return self
        if count is None:
            return self.replace(invalid=(index >= most)[..., None, :, None])
        if count > most:
            raise ValueError(
                f"Segments.at_most = {most} must not be less than the runs of a row, got {count}; "
                f"give at_most={count}"
            )
        return self.replace(at_most=count)

    def allowed(self, at: At) -> Array:
        return self.q.array == self.kv.array

    def tiles(self, tiles: Tiles) -> Array:
        (q_low, q_high), (k_low, k_high) = (
            (tiles.least(x), tiles.greatest(x)) for x in (self.q.array, self.kv.array)
        )
        meet = (q_low <= k_high) & (k_low <= q_high)
        return tile_state(meet, (q_low == q_high) & (k_low == k_high) & (q_low == k_low))


class Documents(PositionDependent):
    """Tokens see those of their own document, of several that stand one after another in a row.

    The first has positions from 0 on. Tokens after the last document are one of their own:
    `Lengths` leaves out padding.

    Attributes:
      lengths: int [*B, documents] (or [documents]), how many tokens each has; 0 for none.
    """

    lengths: Any

    def bind(self, dims: Dims) -> Self:
        lengths = checks.integers("Documents.lengths", self.lengths)
        if lengths.ndim == 0 or lengths.shape[:-1] not in {(), dims.B}:
            raise ValueError(
                f"Documents.lengths must have shape [*B, documents] = {(*dims.B, '·')} or "
                f"[documents], got {lengths.shape}; fill rows of fewer documents with 0"
            )
        checks.within("Documents.lengths", lengths, None, "a length counts tokens")
        xp: Any = np if is_static(lengths) else jnp
        # Of a bound mask, the positions where documents end.
        ends = xp.cumsum(lengths, -1, dtype=np.int32)
        return self.replace(lengths=ends.reshape(-1, ends.shape[-1]))

    def resolve(self, at: At) -> Mask:
        """Return segments: each token's is the number of documents that end before it."""
        ends = self.lengths
        if len(ends) == 1:
            ends = shapes.lead(ends, at.q.ndim + 1)
        else:
            ends = (ends if is_static(ends, at.row) else jnp.asarray(ends))[at.row]
        q, k = ((x[..., None] >= ends).sum(-1, dtype=np.int32) for x in (at.q, at.k))
        most = int(q.max(initial=0)) if is_static(q) else ends.shape[-1]
        return Segments(ScoreArray(q), ScoreArray(k), runs=True, at_most=most + 1)


class Prefix(Mask):
    """A prefix that all see, and causality after it: j < length or j ≤ i.

    Attributes:
      length: int, or int [*B].

    Source: Raffel et al., "Exploring the Limits of Transfer Learning", 2020 (prefix LM).
    """

    length: Any

    def bind(self, dims: Dims) -> Self:
        if jnp.ndim(self.length) == 0:
            length = shapes.lead(checks.integers("Prefix.length", self.length), len(dims.logits))
            return self.replace(length=ScoreArray(length))
        return self.replace(length=_per_row("Prefix.length", self.length, dims))

    def allowed(self, at: At) -> Array:
        return (at.k < self.length.array) | (at.k <= at.q)

    def tiles(self, tiles: Tiles) -> Array:
        length = self.length.array
        prefix = tile_state(tiles.k_min < length, tiles.k_max < length)
        return either(prefix, Causal().tiles(tiles))


def _per_row(name: str, lengths: Any, dims: Dims, per_query: bool = False) -> ScoreArray:
    """Return lengths [*B] (or [*B, T]) as an array over the scores, [*B, 1, 1|T, 1]."""
    lengths = checks.integers(name, lengths)
    if lengths.shape == dims.B:
        return ScoreArray(lengths.reshape(*dims.B, 1, 1, 1))
    if per_query and lengths.shape == (*dims.B, dims.T):
        return ScoreArray(lengths.reshape(*dims.B, 1, dims.T, 1))
    or_per_query = f" or [*B, T] = {(*dims.B, dims.T)}" if per_query else ""
    raise ValueError(
        f"{name} must have shape [*B] = {dims.B}{or_per_query}, got {lengths.shape}; "
        f"give one length for each row of the batch"
    )


def _count_runs(q: Array, kv: Array) -> int | None:
    """Return the most runs of a row, if ids are known, equal, and stand in runs; else None."""
    if not is_static(q, kv) or not q.size or not np.array_equal(q, kv):
        return None
    rows = q.reshape(-1, q.shape[-1])
    most = _runs(rows)[:, -1] + 1
    return int(most.max()) if [len(np.unique(row)) for row in rows] == most.tolist() else None


def _runs(ids: Array) -> Array:
    """Return the number of each token's run, from 0 on, int32 [..., L] as ids."""
    xp: Any = np if is_static(ids) else jnp
    new = ids[..., 1:] != ids[..., :-1]
    first = xp.zeros_like(new, shape=(*ids.shape[:-1], min(1, ids.shape[-1])))
    return xp.cumsum(xp.concatenate([first, new], -1), -1, dtype=np.int32)
