"""The masks by name."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha import inputs, shapes
from flax_mha.grid import Array, At, Grid, Tiles
from flax_mha.masks.base import Mask, as_mask, both, either, farthest, judge, known, seen
from flax_mha.shapes import Dims


class Causal(Mask):
    """A query sees its own position and the ones before: j ≤ i."""

    def allowed(self, at: At) -> Array:
        """See `Mask.allowed`."""
        return at.k <= at.q

    def tiles(self, tiles: Tiles) -> Array:
        """See `Mask.tiles`."""
        return judge(tiles.k_min <= tiles.q_max, tiles.k_max <= tiles.q_min)


class Window(Mask):
    """A query sees the positions near it: i − left ≤ j ≤ i + right.

    Attributes:
      left: how many positions before it; None for all.
      right: how many after it; None for all.
    """

    left: int | None = struct.field(pytree_node=False, default=None)
    right: int | None = struct.field(pytree_node=False, default=None)

    def bind(self, dims: Dims) -> Self:
        """See `Mask.bind`."""
        for name, reach in (("left", self.left), ("right", self.right)):
            if reach is not None and (isinstance(reach, bool) or not isinstance(reach, int)):
                raise TypeError(f"Window.{name} must be an int or None, got {reach!r}")
            if reach is not None and reach < 0:
                raise ValueError(f"Window.{name} must be at least 0, got {reach}; None is no limit")
        return self

    def allowed(self, at: At) -> Array:
        """See `Mask.allowed`."""
        near = jnp.ones((1,) * at.q.ndim, bool)
        if self.left is not None:
            near = near & (at.k >= at.q - self.left)
        if self.right is not None:
            near = near & (at.k <= at.q + self.right)
        return near

    def tiles(self, tiles: Tiles) -> Array:
        """See `Mask.tiles`."""
        verdict: Array = judge(np.True_, np.True_)
        if self.left is not None:
            far = tiles.k_max >= tiles.q_min - self.left
            verdict = both(verdict, judge(far, tiles.k_min >= tiles.q_max - self.left))
        if self.right is not None:
            far = tiles.k_min <= tiles.q_max + self.right
            verdict = both(verdict, judge(far, tiles.k_max <= tiles.q_min + self.right))
        return verdict

    def reach(self) -> int | None:
        """See `Mask.reach`."""
        return self.left


class Lengths(Mask):
    """Only the first `kv` keys are real: j < kv.

    Attributes:
      kv: int, [*B], or [*B, T] for a length per query (the `valid_lens` of d2l).
      q: int [*B] or None. Queries at positions i ≥ q see nothing, so their output is 0.
    """

    kv: Any
    q: Any = None

    def bind(self, dims: Dims) -> Self:
        """See `Mask.bind`."""
        q = None if self.q is None else _per_row("Lengths.q", self.q, dims)
        return self.replace(kv=_per_row("Lengths.kv", self.kv, dims, per_query=True), q=q)

    def allowed(self, at: At) -> Array:
        """See `Mask.allowed`."""
        real = at.k < self.kv.array
        return real if self.q is None else real & (at.q < self.q.array)

    def tiles(self, tiles: Tiles) -> Array:
        """See `Mask.tiles`."""
        low, high = tiles.least(self.kv.array), tiles.greatest(self.kv.array)
        verdict = judge(tiles.k_min < high, tiles.k_max < low)
        if self.q is None:
            return verdict
        q = self.q.array
        return both(verdict, judge(tiles.q_min < q, tiles.q_max < q))


class Segments(Mask):
    """Tokens see those of their own segment: packed documents, images, padding as one of its own.

    Attributes:
      q: int [*B, T] (or [T]), the segment of each query.
      kv: int [*B, S] (or [S]), the segment of each key (default: q).
    """

    q: Any
    kv: Any = None

    def bind(self, dims: Dims) -> Self:
        """See `Mask.bind`."""
        q = _per_token("Segments.q", self.q, dims.T, dims)
        kv = _per_token("Segments.kv", self.q if self.kv is None else self.kv, dims.S, dims)
        return self.replace(q=Grid(q[..., None, :, None]), kv=Grid(kv[..., None, None, :]))

    def allowed(self, at: At) -> Array:
        """See `Mask.allowed`."""
        return self.q.array == self.kv.array

    def tiles(self, tiles: Tiles) -> Array:
        """See `Mask.tiles`."""
        (q_low, q_high), (k_low, k_high) = (
            (tiles.least(x), tiles.greatest(x)) for x in (self.q.array, self.kv.array)
        )
        meet = (q_low <= k_high) & (k_low <= q_high)
        return judge(meet, (q_low == q_high) & (k_low == k_high) & (q_low == k_low))


class Prefix(Mask):
    """A prefix that all see, and causality after it: j < length or j ≤ i.

    Attributes:
      length: int, or int [*B].

    Source: Raffel et al., "Exploring the Limits of Transfer Learning", 2020 (prefix LM).
    """

    length: Any

    def bind(self, dims: Dims) -> Self:
        """See `Mask.bind`."""
        if jnp.ndim(self.length) == 0:
            length = shapes.lead(inputs.integers("Prefix.length", self.length), len(dims.logits))
            return self.replace(length=Grid(length))
        return self.replace(length=_per_row("Prefix.length", self.length, dims))

    def allowed(self, at: At) -> Array:
        """See `Mask.allowed`."""
        return (at.k < self.length.array) | (at.k <= at.q)

    def tiles(self, tiles: Tiles) -> Array:
        """See `Mask.tiles`."""
        length = self.length.array
        prefix = judge(tiles.k_min < length, tiles.k_max < length)
        return either(prefix, Causal().tiles(tiles))


class Predicate(Mask):
    """Any rule: the pair is allowed where fn(row, head, i, j, *args) is True.

    Attributes:
      fn: a function of four integer arrays that broadcast against each other (the index of the
        batch row and the head, the positions of query and key) and of args; returns bool.
      args: arrays and numbers that fn needs. Traced arrays must be given here, not in fn's closure.
    """

    fn: Callable[..., jax.Array] = struct.field(pytree_node=False)
    args: tuple[jax.Array, ...] = ()

    def bind(self, dims: Dims) -> Self:
        """See `Mask.bind`."""
        args = inputs.arguments("Predicate.args", self.args)
        inputs.function(
            "Predicate.fn", self.fn, "(row, head, i, j, *args) -> bool",
            "take the row, the head, the positions of query and key, then args", 4 + len(args),
        )  # fmt: skip
        return self.replace(args=args)

    def allowed(self, at: At) -> Array:
        """See `Mask.allowed`."""
        return self.fn(at.row, at.head, at.q, at.k, *self.args)


class PerHead(Mask):
    """A mask for each query head.

    Attributes:
      masks: N of them.
    """

    masks: Sequence[Mask]

    def bind(self, dims: Dims) -> Self:
        """See `Mask.bind`."""
        if not isinstance(self.masks, tuple | list):
            raise TypeError(
                f"PerHead needs a sequence of masks, one for each of the {dims.N} query heads, got "
                f"{type(self.masks).__name__}; one mask for all heads needs no PerHead"
            )
        if len(self.masks) != dims.N:
            raise ValueError(
                f"PerHead needs a mask for each of the {dims.N} query heads, got "
                f"{len(self.masks)}; one mask for all heads needs no PerHead"
            )
        return self.replace(masks=tuple(as_mask(mask).bind(dims) for mask in self.masks))

    def allowed(self, at: At) -> Array:
        """See `Mask.allowed`."""
        shape = jnp.broadcast_shapes(*(x.shape for x in at))

        def of(mask: Mask) -> jax.Array:
            return jnp.broadcast_to(seen(mask, at), shape)

        if at.head.size == 1:
            return jax.lax.switch(at.head.reshape(()), [lambda m=m: of(m) for m in self.masks])
        table = of(self.masks[0])
        for head, mask in enumerate(self.masks[1:], 1):
            table = jnp.where(at.head == head, of(mask), table)
        return table

    def tiles(self, tiles: Tiles) -> Array:
        """See `Mask.tiles`."""
        rank, each = tiles.q_min.ndim, []
        if tiles.heads is not None:
            table = shapes.lead(jnp.asarray(self.masks[0].tiles(tiles)), rank)
            for head, mask in enumerate(self.masks[1:], 1):
                verdict = shapes.lead(jnp.asarray(mask.tiles(tiles)), rank)
                table = jnp.where(tiles.heads == head, verdict, table)
            return table
        for head, mask in enumerate(self.masks):
            verdict = shapes.lead(mask.tiles(tiles), rank)
            each.append(verdict[..., head : head + 1, :, :] if verdict.shape[-3] > 1 else verdict)
        shape = np.broadcast_shapes(*(verdict.shape for verdict in each))
        xp = np if known(*each) else jnp
        return xp.concatenate([xp.broadcast_to(verdict, shape) for verdict in each], axis=-3)

    def reach(self) -> int | None:
        """See `Mask.reach`."""
        return farthest(self.masks)


def _per_row(name: str, lengths: Any, dims: Dims, per_query: bool = False) -> Grid:
    """Lengths [*B] (or [*B, T]) over the scores, [*B, 1, 1|T, 1]."""
    lengths = inputs.integers(name, lengths)
    if lengths.shape == dims.B:
        return Grid(lengths.reshape(*dims.B, 1, 1, 1))
    if per_query and lengths.shape == (*dims.B, dims.T):
        return Grid(lengths.reshape(*dims.B, 1, dims.T, 1))
    or_per_query = f" or [*B, T] = {(*dims.B, dims.T)}" if per_query else ""
    raise ValueError(
        f"{name} must have shape [*B] = {dims.B}{or_per_query}, got {lengths.shape}; "
        f"give one length for each row of the batch"
    )


def _per_token(name: str, ids: Any, length: int, dims: Dims) -> Array:
    """Ids [length] or [*B, length] as [*B|1, length]."""
    ids = inputs.integers(name, ids)
    if ids.shape not in {(length,), (*dims.B, length)}:
        raise ValueError(
            f"{name} must have shape {(length,)} or [*B, ·] = {(*dims.B, length)}, "
            f"got {ids.shape}; give one id for each token"
        )
    return shapes.lead(ids, len(dims.B) + 1)
