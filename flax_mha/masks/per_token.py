"""Masks with data for each example of the batch, or for each token."""

import functools
from collections.abc import Callable
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha import sharding
from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import Array, At, ScoreArray, Tiles, numpy_of
from flax_mha.base.shapes import Dims
from flax_mha.masks.algebra import Dense, Mask, lengths_as_scores
from flax_mha.masks.positional import Causal
from flax_mha.masks.states import both, is_static, tile_state
from flax_mha.sharding.prefix_sums import counts


class Lengths(Mask):
    """A mask of padding at the end: a query may attend to the keys j < kv.

    Attributes:
      kv: the number of real keys, int, int [*B], or int [*B, T] for each query.
      q: the number of real queries from position 0, int or int [*B] (default: all). Others are
        fully masked. A call of 4 real queries at `q_positions=8` has q=12.

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
    """A mask of keys, for padding in any place.

    Attributes:
      real: bool [*B, S] or [S], True where queries may attend to the key. PyTorch's
        `key_padding_mask` is the opposite: give `~key_padding_mask`.
    """

    real: Any

    def bind(self, dims: Dims) -> Mask:
        real = checks.array("Keys.real", self.real)
        return Dense(numpy_of(real).expand_dims(real, (-3, -2))).bind(dims)


class Segments(Mask):
    """A mask in which a query may attend to the keys of its own segment, as in packed documents.

    Attributes:
      q: int [*B, T] or [T], the segment id of each query.
      kv: int [*B, S] or [S], the segment id of each key (default: q).
      runs: True if each segment is a contiguous run of equal ids, as some kernels need. An id that
        reappears then starts a new segment, and `kv` must be None.
      at_most: the most runs of an example in traced ids, for kernels whose memory grows with their
        number. Queries of later runs are fully masked.
    """

    q: Any
    kv: Any = None
    runs: bool = struct.field(pytree_node=False, default=False)
    at_most: int | None = struct.field(pytree_node=False, default=None)

    def bind(self, dims: Dims) -> Self:
        if self.runs and self.kv is not None:
            raise ValueError(
                "Segments.kv must be None with runs=True, where queries and keys are the same "
                "tokens, got an array; leave kv out"
            )
        q, kv = _per_token(self, dims)
        if not (self.runs or _are_runs(q, kv)):
            return self.replace(**_over_scores(q, kv))
        most, q = self.at_most, _runs(q)
        kv = q
        if is_static(q):
            most = int(q.max(initial=0)) + 1
        elif most is not None:
            kv = jnp.where(q < most, q, -1)  # No query sees the runs beyond.
        return self.replace(runs=True, at_most=most, **_over_scores(q, kv))

    def allowed(self, at: At) -> Array:
        return self.q.array == self.kv.array

    def tiles(self, tiles: Tiles) -> Array:
        (q_low, q_high), (k_low, k_high) = (
            (tiles.least(x), tiles.greatest(x)) for x in (self.q.array, self.kv.array)
        )
        overlap = (q_low <= k_high) & (k_low <= q_high)
        return tile_state(overlap, (q_low == q_high) & (k_low == k_high) & (q_low == k_low))


class AtLeast(Mask):
    """A mask in which a query may attend to the keys of its own number and of lower ones.

    With the frames of a video as numbers, it is causal between frames and full within each.

    Attributes:
      q: int [*B, T] or [T], the number of each query.
      kv: int [*B, S] or [S], the number of each key (default: q).
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
    """A mask in which a query may attend to the keys of its own document, by their lengths.

    Documents follow one another from position 0. Tokens after the last one form another document.

    Attributes:
      lengths: int [*B, documents] or [documents], the tokens of each document, 0 for an empty one.
    """

    lengths: Any

    def bind(self, dims: Dims) -> Self:
        lengths = checks.integers("Documents.lengths", self.lengths)
        if lengths.ndim == 0 or lengths.shape[:-1] not in {(), dims.B}:
            raise ValueError(
                f"Documents.lengths must have shape [*B, documents] = {(*dims.B, '·')} or "
                f"[documents], got {lengths.shape}; fill examples of fewer documents with 0"
            )
        checks.within("Documents.lengths", lengths, None, "a length counts tokens")
        # Once bound, the mask holds the positions where documents end.
        if not is_static(lengths):
            lengths = sharding.constrain(lengths, (None,) * lengths.ndim)  # on every device
        ends = numpy_of(lengths).cumsum(lengths, -1, dtype=np.int32)
        return self.replace(lengths=ends.reshape(-1, ends.shape[-1]))

    def allowed(self, at: At) -> Array:
        return self.resolve(at).allowed(at)

    def resolve(self, at: At) -> Mask:
        """Return `Segments` whose ids count the documents that end before a token."""
        ends = self.lengths
        if len(ends) == 1:
            ends = shapes.lead(ends, at.q.ndim + 1)
        else:
            ends = (ends if is_static(ends, at.row) else jnp.asarray(ends))[at.row]
        q, k = ((x[..., None] >= ends).sum(-1, dtype=np.int32) for x in (at.q, at.k))
        last = int(q.max(initial=0)) if is_static(q) else ends.shape[-1]
        return Segments(ScoreArray(q), ScoreArray(k), runs=True, at_most=last + 1)


def Prefix(length: Any) -> Mask:
    """Return a causal mask with a prefix that all queries may attend to: j < length or j ≤ i.

    Args:
      length: the length of the prefix, int or int [*B].

    Source: Raffel et al., "Exploring the Limits of Transfer Learning", 2020 (prefix LM).
    """
    return Lengths(length) | Causal()


def block_diffusion(length: int, block: int) -> Mask:
    """Return the mask for training a language model by block diffusion.

    After `length` noisy tokens come the same tokens clean. A noisy token may attend to its noisy
    block and to earlier clean blocks, a clean token to its clean block and earlier ones.

    Args:
      length: n, the number of noisy tokens, so that T = S = 2·n.
      block: the tokens of a block.

    Raises:
      ValueError: if a number is not positive, or, in a call, if T or S is not 2·n.

    Source: Arriola et al., "Block Diffusion", 2025.
    """
    checks.positive(length=length, block=block)
    at = np.arange(length, dtype=np.int32) // block
    none = np.full_like(at, -1)
    own_noise = Segments(np.concatenate([at, none]), np.concatenate([at, none - 1]))
    # Noisy keys have a number above that of any query.
    hidden = np.full_like(at, length)
    clean = AtLeast(np.concatenate([at - 1, at]), np.concatenate([hidden, at]))
    return own_noise | clean


def _per_token(mask: Any, dims: Dims) -> list[Array]:
    """Return the integers of queries [*B|1, T|1] and of keys [*B|1, S|1] of a mask."""
    arrays = []
    keys = mask.q if mask.kv is None else mask.kv
    for field, x, letter, size in (("q", mask.q, "T", dims.T), ("kv", keys, "S", dims.S)):
        name = f"{type(mask).__name__}.{field}"
        x = checks.integers(name, x)
        expected, remedy = (*dims.B, size), "give one number for each token"
        shapes.check_broadcasts(name, x.shape, expected, f"[*B, {letter}]", remedy)
        arrays.append(shapes.lead(x, len(expected)))
    return arrays


def _over_scores(q: Array, kv: Array) -> dict[str, ScoreArray]:
    """Reshape the numbers of queries and keys to [*B|1, 1, T|1, S|1]."""
    return {"q": ScoreArray(q[..., None, :, None]), "kv": ScoreArray(kv[..., None, None, :])}


def _are_runs(q: Array, kv: Array) -> bool:
    """Tell if the ids are static, the same for queries and keys, and all contiguous."""
    if not is_static(q, kv) or not q.size or not np.array_equal(q, kv):
        return False
    examples = q.reshape(-1, q.shape[-1])
    counts = _runs(examples)[:, -1] + 1
    return [len(np.unique(ids)) for ids in examples] == counts.tolist()


def _runs(ids: Array) -> Array:
    """Return the index of the run of each token, int32."""
    if is_static(ids):
        return _indices(lambda starts: starts.cumsum(-1, dtype=np.int32), ids)
    return sharding.auto(functools.partial(_indices, counts), (), ids)


def _indices(count: Callable[[Any], Array], ids: Array) -> Array:
    # The first token is compared with the last.
    index = count(numpy_of(ids).roll(ids, 1, -1) != ids)
    return index - index[..., :1]
