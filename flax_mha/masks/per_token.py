"""Masks with data for each example of the batch, or for each token."""

from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import Array, At, ScoreArray, Tiles
from flax_mha.base.shapes import Dims
from flax_mha.masks.algebra import Dense, Mask
from flax_mha.masks.arrays import lengths_as_scores
from flax_mha.masks.positional import Causal
from flax_mha.masks.states import both, either, is_static, tile_state


class Lengths(Mask):
    """A mask of padding by position: the keys before position `kv` are real, j < kv.

    Attributes:
      kv: int or int [*B], the number of real keys; or [*B, T], for each query (the `valid_lens` of
        d2l).
      q: int or int [*B], the number of real queries (default: all). The others are fully masked, so
        their output is 0. It counts from position 0: a call at `q_positions=8` with 4 real queries
        has q=12.

    Raises:
      ValueError: if a static `q` above 0 leaves none of a call's queries, at static positions.
    """

    kv: Any
    q: Any = None

    def bind(self, dims: Dims) -> Self:
        q = None if self.q is None else lengths_as_scores("Lengths.q", self.q, dims)
        return self.replace(kv=lengths_as_scores("Lengths.kv", self.kv, dims, per_query=True), q=q)

    def check_positions(self, at: At) -> None:
        q: Any = None if self.q is None else self.q.array
        if is_static(q, at.q) and at.q.size and q.any() and np.all(at.q >= q):
            raise ValueError(
                f"Lengths.q counts queries from position 0, so it must be above the position of a "
                f"query of the call, got {q.ravel().tolist()} and positions from {at.q.min()}; add "
                f"the queries of earlier calls, or leave q out"
            )

    def allowed(self, at: At) -> Array:
        allowed = at.k < self.kv.array
        return allowed if self.q is None else allowed & (at.q < self.q.array)

    def tiles(self, tiles: Tiles) -> Array:
        low, high = tiles.least(self.kv.array), tiles.greatest(self.kv.array)
        state = tile_state(tiles.k_min < high, tiles.k_max < low)
        if self.q is None:
            return state
        q = self.q.array
        return both(state, tile_state(tiles.q_min < q, tiles.q_max < q))


class Keys(Mask):
    """A mask of keys, such as a padding mask.

    Attributes:
      real: bool [*B, S] (or [S]), True where a key may be seen. (PyTorch's `key_padding_mask` is
        True where it may not: give `~key_padding_mask`.)
    """

    real: Any

    def bind(self, dims: Dims) -> Mask:
        real = checks.array("Keys.real", self.real)
        expected = {"[S]": (dims.S,), "[*B, S]": (*dims.B, dims.S)}
        shapes.check_shape("Keys.real", real, expected, "give a bool for each key")
        return Dense(real[..., None, None, :]).bind(dims)


class Segments(Mask):
    """A mask in which tokens see their own segment, such as a packed document or an image.

    Attributes:
      q: int [*B, T] (or [T]), the segment id of each query.
      kv: int [*B, S] (or [S]), the segment id of each key (default: q).
      runs: True if segments are contiguous runs of equal ids; an id that reappears later starts a
        new segment, and `kv` must be None. Some kernels need runs; they recognize them in static
        ids without this flag.
      at_most: the most runs of an example, for kernels whose memory grows with it. More runs are
        an error; if the ids are traced, queries of the runs beyond it are fully masked.
    """

    q: Any
    kv: Any = None
    runs: bool = struct.field(pytree_node=False, default=False)
    at_most: int | None = struct.field(pytree_node=False, default=None)

    def bind(self, dims: Dims) -> Self:
        q, kv = _per_token(self, dims)
        if checks.flag("Segments.runs", self.runs) or self.at_most is not None:
            self._check()
            q = kv = _runs(q)
            bound, kv = self._limit_runs(q)
        elif count := _count_runs(q, kv):
            q = kv = _runs(q)
            bound = self.replace(runs=True, at_most=count)
        else:
            bound = self
        return bound.replace(**_over_scores(q, kv))

    def _check(self) -> None:
        if self.at_most is not None:
            checks.positive(**{"Segments.at_most": self.at_most})
        if not self.runs:
            raise ValueError("Segments.at_most counts runs, got runs=False; give runs=True")
        if self.kv is not None:
            raise ValueError(
                "Segments.kv must be None with runs=True, where queries and keys are the same "
                "tokens, got an array; leave kv out"
            )

    def _limit_runs(self, index: Array) -> tuple[Self, Array]:
        """Return the mask with the static number of runs as `at_most`, and the runs of the keys.

        A traced run beyond `at_most` is −1, so that no query sees it.
        """
        if not is_static(index):
            most = self.at_most
            return self, index if most is None else jnp.where(index < most, index, -1)
        count = int(index.max(initial=0)) + 1
        limit = self.at_most or count
        if count > limit:
            raise ValueError(
                f"Segments.at_most must be at least the number of runs of each example, got "
                f"{limit} for {count} runs; give at_most={count}"
            )
        return self.replace(at_most=count), index

    def allowed(self, at: At) -> Array:
        return self.q.array == self.kv.array

    def tiles(self, tiles: Tiles) -> Array:
        (q_low, q_high), (k_low, k_high) = (
            (tiles.least(x), tiles.greatest(x)) for x in (self.q.array, self.kv.array)
        )
        overlap = (q_low <= k_high) & (k_low <= q_high)
        return tile_state(overlap, (q_low == q_high) & (k_low == k_high) & (q_low == k_low))


class AtLeast(Mask):
    """A mask by numbers of tokens: a query sees the keys of its own number and of lower ones.

    With the frames of a video as numbers, it is causal between frames and full within each.

    Attributes:
      q: int [*B, T] (or [T]), the number of each query.
      kv: int [*B, S] (or [S]), the number of each key (default: q).
    """

    q: Any
    kv: Any = None

    def bind(self, dims: Dims) -> Self:
        return self.replace(**_over_scores(*_per_token(self, dims)))

    def allowed(self, at: At) -> Array:
        return self.q.array >= self.kv.array

    def tiles(self, tiles: Tiles) -> Array:
        q, kv = self.q.array, self.kv.array
        some = tiles.greatest(q) >= tiles.least(kv)
        return tile_state(some, tiles.least(q) >= tiles.greatest(kv))


class Documents(Mask):
    """A mask in which tokens see their own document, for several consecutive ones.

    The first document starts at position 0. Tokens after the last one form another document; add
    `Lengths` if they are padding.

    Attributes:
      lengths: int [*B, documents] (or [documents]), the number of tokens of each document; 0 for
        an empty one.
    """

    lengths: Any

    def bind(self, dims: Dims) -> Self:
        lengths = checks.integers("Documents.lengths", self.lengths)
        if 0 in lengths.shape[-1:] or lengths.shape[:-1] not in {(), dims.B} or not lengths.ndim:
            raise ValueError(
                f"Documents.lengths must have shape [*B, documents] = {(*dims.B, '·')} or "
                f"[documents], got {lengths.shape}; fill examples of fewer documents with 0"
            )
        checks.within("Documents.lengths", lengths, None, "a length counts tokens")
        xp: Any = np if is_static(lengths) else jnp
        # A bound mask holds the positions where documents end.
        ends = xp.cumsum(lengths, -1, dtype=np.int32)
        return self.replace(lengths=ends.reshape(-1, ends.shape[-1]))

    def allowed(self, at: At) -> Array:
        return self.resolve(at).allowed(at)

    def tiles(self, tiles: Tiles) -> Array:
        return tile_state(np.True_, np.False_)

    def resolve(self, at: At) -> Mask:
        """Return `Segments`, whose ids are the number of documents that end before a token."""
        ends = self.lengths
        if len(ends) == 1:
            ends = shapes.lead(ends, at.q.ndim + 1)
        else:
            ends = (ends if is_static(ends, at.row) else jnp.asarray(ends))[at.row]
        q, k = ((x[..., None] >= ends).sum(-1, dtype=np.int32) for x in (at.q, at.k))
        last = int(q.max(initial=0)) if is_static(q) else ends.shape[-1]
        return Segments(ScoreArray(q), ScoreArray(k), runs=True, at_most=last + 1)


class Prefix(Mask):
    """A causal mask with a prefix that all queries see: j < length or j ≤ i.

    Attributes:
      length: int or int [*B], the length of the prefix.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning", 2020 (prefix LM).
    """

    length: Any

    def bind(self, dims: Dims) -> Self:
        return self.replace(length=lengths_as_scores("Prefix.length", self.length, dims))

    def allowed(self, at: At) -> Array:
        return (at.k < self.length.array) | (at.k <= at.q)

    def tiles(self, tiles: Tiles) -> Array:
        length = self.length.array
        prefix = tile_state(tiles.k_min < length, tiles.k_max < length)
        return either(prefix, Causal().tiles(tiles))


def _per_token(mask: Any, dims: Dims) -> tuple[Array, Array]:
    """Return a mask's integers of queries [*B|1, T|1] and of keys [*B|1, S|1]."""
    numbers = {"q": (mask.q, "T", dims.T), "kv": (mask.kv, "S", dims.S)}
    if mask.kv is None:
        numbers["kv"] = (mask.q, "S", dims.S)
    found = []
    for field, (x, letter, size) in numbers.items():
        name = f"{type(mask).__name__}.{field}"
        x = checks.integers(name, x)
        expected, remedy = (*dims.B, size), "give one number for each token"
        shapes.check_broadcasts(name, x.shape, expected, f"[*B, {letter}]", remedy)
        found.append(shapes.lead(x, len(expected)))
    return found[0], found[1]


def _over_scores(q: Array, kv: Array) -> dict[str, ScoreArray]:
    """Reshape the numbers of queries and keys to [*B|1, 1, T|1, S|1]."""
    return {"q": ScoreArray(q[..., None, :, None]), "kv": ScoreArray(kv[..., None, None, :])}


def _count_runs(q: Array, kv: Array) -> int | None:
    """Return the most runs of an example, or None if the ids are traced, unequal or no runs."""
    if not is_static(q, kv) or not q.size or not np.array_equal(q, kv):
        return None
    examples = q.reshape(-1, q.shape[-1])
    counts = _runs(examples)[:, -1] + 1
    are_runs = [len(np.unique(ids)) for ids in examples] == counts.tolist()
    return int(counts.max()) if are_runs else None


def _runs(ids: Array) -> Array:
    """Return the index of each token's run, int32 in the shape of the ids."""
    xp: Any = np if is_static(ids) else jnp
    new = ids[..., 1:] != ids[..., :-1]
    first = xp.zeros_like(new, shape=(*ids.shape[:-1], min(1, ids.shape[-1])))
    return xp.cumsum(xp.concatenate([first, new], -1), -1, dtype=np.int32)
