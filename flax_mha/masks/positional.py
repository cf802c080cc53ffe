"""Masks of positions: causal, windows, lattices, any function."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha.base import checks, shapes, symbols
from flax_mha.base.coordinates import Array, At, Tiles
from flax_mha.base.shapes import Dims
from flax_mha.masks.base import Mask, as_mask, evaluate, greatest_lookback
from flax_mha.masks.tiles import both, is_static, tile_state


class Causal(Mask):
    """A query sees its own position and the ones before: j ≤ i."""

    def allowed(self, at: At) -> Array:
        return at.k <= at.q

    def tiles(self, tiles: Tiles) -> Array:
        return tile_state(tiles.k_min <= tiles.q_max, tiles.k_max <= tiles.q_min)


class Window(Mask):
    """A query sees the positions near it: i − left ≤ j ≤ i + right.

    Attributes:
      left: how many positions before it; None for all.
      right: how many after it; None for all.
    """

    left: int | None = struct.field(pytree_node=False, default=None)
    right: int | None = struct.field(pytree_node=False, default=None)

    def bind(self, dims: Dims) -> Self:
        for name, limit in (("left", self.left), ("right", self.right)):
            if limit is None:
                continue
            checks.static(f"Window.{name}", limit)
            if isinstance(limit, bool) or not isinstance(limit, int):
                raise TypeError(f"Window.{name} must be an int or None, got {limit!r}")
            # Positions and what is added to them have to fit int32 together.
            if not 0 <= limit < 2**30:
                raise ValueError(
                    f"Window.{name} must be at least 0 and below 2³⁰, got {limit}; None is no limit"
                )
        return self

    def allowed(self, at: At) -> Array:
        near = jnp.ones((1,) * at.q.ndim, bool)
        if self.left is not None:
            near = near & (at.k >= at.q - self.left)
        if self.right is not None:
            near = near & (at.k <= at.q + self.right)
        return near

    def tiles(self, tiles: Tiles) -> Array:
        verdict: Array = tile_state(np.True_, np.True_)
        if self.left is not None:
            far = tiles.k_max >= tiles.q_min - self.left
            verdict = both(verdict, tile_state(far, tiles.k_min >= tiles.q_max - self.left))
        if self.right is not None:
            far = tiles.k_min <= tiles.q_max + self.right
            verdict = both(verdict, tile_state(far, tiles.k_max <= tiles.q_min + self.right))
        return verdict

    def max_lookback(self) -> int | None:
        return self.left


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
        args = checks.arguments("Predicate.args", self.args)
        checks.function(
            "Predicate.fn", self.fn, "(row, head, i, j, *args) -> bool",
            "take the row, the head, the positions of query and key, then args", 4 + len(args),
        )  # fmt: skip
        return self.replace(args=args)

    def allowed(self, at: At) -> Array:
        return self.fn(at.row, at.head, at.q, at.k, *self.args)


class PerHead(Mask):
    """A mask for each query head.

    Attributes:
      masks: N of them.
    """

    masks: Sequence[Mask]

    def bind(self, dims: Dims) -> Self:
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
        shape = jnp.broadcast_shapes(*(x.shape for x in at))

        def of(mask: Mask) -> jax.Array:
            return jnp.broadcast_to(evaluate(mask, at), shape)

        if at.head.size == 1:
            return jax.lax.switch(at.head.reshape(()), [lambda m=m: of(m) for m in self.masks])
        table = of(self.masks[0])
        for head, mask in enumerate(self.masks[1:], 1):
            table = jnp.where(at.head == head, of(mask), table)
        return table

    def tiles(self, tiles: Tiles) -> Array:
        each = [shapes.lead(mask.tiles(tiles), tiles.q_min.ndim) for mask in self.masks]
        if tiles.heads is not None:
            table = jnp.asarray(each[0])
            for head, verdict in enumerate(each[1:], 1):
                table = jnp.where(tiles.heads == head, verdict, table)
            return table
        each = [x[..., i : i + 1, :, :] if x.shape[-3] > 1 else x for i, x in enumerate(each)]
        shape = jnp.broadcast_shapes(*(verdict.shape for verdict in each))
        xp = np if is_static(*each) and not symbols.is_symbolic(*shape) else jnp
        return xp.concatenate([xp.broadcast_to(verdict, shape) for verdict in each], axis=-3)

    def max_lookback(self) -> int | None:
        return greatest_lookback(self.masks)


class Dilated(Mask):
    """A query sees every n-th position, counted from its own: (i − j) mod n = 0.

    >>> mask = Causal() & Window(left=7 * 4) & Dilated(4)  # the last 8 of every fourth

    Attributes:
      step: n.

    Source: Child et al., "Generating Long Sequences with Sparse Transformers", 2019.
    """

    step: int = struct.field(pytree_node=False)

    def bind(self, dims: Dims) -> Self:
        checks.positive(**{"Dilated.step": self.step})
        return self

    def allowed(self, at: At) -> Array:
        return (at.q - at.k) % self.step == 0

    def tiles(self, tiles: Tiles) -> Array:
        least, most = tiles.q_min - tiles.k_max, tiles.q_max - tiles.k_min
        some = most // self.step * self.step >= least
        return tile_state(some, (least == most) & some if self.step > 1 else some)


class Neighborhood(Mask):
    """On a lattice a query sees the tokens nearest to it, at the border as many as inside.

    On an axis of n tokens with windows of w, a query at c sees the keys from
    min(max(c − ⌊w/2⌋, 0), n − w) on, w of them. Tokens stand row by row, the last axis fastest.

    Attributes:
      sizes: tokens of each axis, such as (height, width) or (frames, height, width).
      window: tokens of a window on each axis, or one number for all.

    Source: Hassani et al., "Neighborhood Attention Transformer", 2023.
    """

    sizes: Sequence[int] = struct.field(pytree_node=False)
    window: int | Sequence[int] = struct.field(pytree_node=False)

    def bind(self, dims: Dims) -> Self:
        sizes, window = checks.sizes("Neighborhood.sizes", self.sizes), self.window
        window = (window,) * len(sizes) if isinstance(window, int) else window
        window = checks.sizes("Neighborhood.window", window)
        if not sizes or len(sizes) != len(window):
            raise ValueError(
                f"Neighborhood needs a size and a window for each axis, got {self.sizes} and "
                f"{self.window}"
            )
        if not all(1 <= w <= n for n, w in zip(sizes, window, strict=True)):
            raise ValueError(
                f"Neighborhood.window must be from 1 to the sizes {sizes}, got {window}"
            )
        if math.prod(sizes) < max(dims.T, dims.S):
            raise ValueError(
                f"Neighborhood.sizes {sizes} has {math.prod(sizes)} tokens, the call has "
                f"T={dims.T} and S={dims.S}; give the lattice of all of them"
            )
        return self.replace(sizes=sizes, window=window)

    def _axes(self) -> Iterator[tuple[int, int, int]]:
        """Yield for each axis its size, its window, and the tokens of one step along it."""
        window: Any = self.window  # Of a bound mask one for each axis.
        for n, (size, w) in enumerate(zip(self.sizes, window, strict=True)):
            yield size, w, math.prod(self.sizes[n + 1 :])

    def allowed(self, at: At) -> Array:
        allowed: Any = True
        for size, window, stride in self._axes():
            first = _first(at.q // stride % size, size, window)
            k = at.k // stride % size
            allowed = (k >= first) & (k < first + window) & allowed
        return allowed

    def tiles(self, tiles: Tiles) -> Array:
        verdict: Array = tile_state(np.True_, np.True_)
        for size, window, stride in self._axes():
            q_min, q_max = _span(tiles.q_min, tiles.q_max, stride, size)
            k_min, k_max = _span(tiles.k_min, tiles.k_max, stride, size)
            low, high = (_first(x, size, window) for x in (q_min, q_max))
            some = (k_max >= low) & (k_min < high + window)
            verdict = both(verdict, tile_state(some, (k_min >= high) & (k_max < low + window)))
        return verdict


def _first(c: Array, size: int, window: int) -> Array:
    """Return the first key of a query's window."""
    return (c - window // 2).clip(0, size - window)


def _span(first: Array, last: Array, stride: int, size: int) -> tuple[Array, Array]:
    """Return the least and the greatest coordinate on an axis of tokens from first to last."""
    xp: Any = np if is_static(first, last) else jnp
    first, last = first // stride, last // stride
    whole = first // size != last // size
    return xp.where(whole, 0, first % size), xp.where(whole, size - 1, last % size)
