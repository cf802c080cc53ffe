"""Masks of tokens that stand on a lattice: every n-th, or the pixels of an image or a video."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha import inputs
from flax_mha.grid import Array, At, Tiles
from flax_mha.masks.base import Mask
from flax_mha.masks.tiles import both, judge, known
from flax_mha.shapes import Dims


class Dilated(Mask):
    """A query sees every n-th position, counted from its own: (i − j) mod n = 0.

    >>> mask = Causal() & Window(left=7 * 4) & Dilated(4)  # the last 8 of every fourth

    Attributes:
      step: n.

    Source: Child et al., "Generating Long Sequences with Sparse Transformers", 2019.
    """

    step: int = struct.field(pytree_node=False)

    def bind(self, dims: Dims) -> Self:
        """See `Mask.bind`."""
        inputs.positive(**{"Dilated.step": self.step})
        return self

    def allowed(self, at: At) -> Array:
        """See `Mask.allowed`."""
        return (at.q - at.k) % self.step == 0

    def tiles(self, tiles: Tiles) -> Array:
        """See `Mask.tiles`."""
        least, most = tiles.q_min - tiles.k_max, tiles.q_max - tiles.k_min
        some = most // self.step * self.step >= least
        return judge(some, (least == most) & some if self.step > 1 else some)


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
        """See `Mask.bind`."""
        sizes, window = inputs.sizes("Neighborhood.sizes", self.sizes), self.window
        window = (window,) * len(sizes) if isinstance(window, int) else window
        window = inputs.sizes("Neighborhood.window", window)
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
        """Of each axis its size, its window, and how many tokens one step on it is."""
        window: Any = self.window  # Of a bound mask one for each axis.
        for n, (size, w) in enumerate(zip(self.sizes, window, strict=True)):
            yield size, w, math.prod(self.sizes[n + 1 :])

    def allowed(self, at: At) -> Array:
        """See `Mask.allowed`."""
        found: Any = True
        for size, window, stride in self._axes():
            first = _first(at.q // stride % size, size, window)
            k = at.k // stride % size
            found = (k >= first) & (k < first + window) & found
        return found

    def tiles(self, tiles: Tiles) -> Array:
        """See `Mask.tiles`."""
        verdict: Array = judge(np.True_, np.True_)
        for size, window, stride in self._axes():
            q_min, q_max = _span(tiles.q_min, tiles.q_max, stride, size)
            k_min, k_max = _span(tiles.k_min, tiles.k_max, stride, size)
            low, high = (_first(x, size, window) for x in (q_min, q_max))
            some = (k_max >= low) & (k_min < high + window)
            verdict = both(verdict, judge(some, (k_min >= high) & (k_max < low + window)))
        return verdict


def _first(c: Array, size: int, window: int) -> Array:
    """The first key of a query's window."""
    return (c - window // 2).clip(0, size - window)


def _span(first: Array, last: Array, stride: int, size: int) -> tuple[Array, Array]:
    """The least and the greatest coordinate on an axis of the tokens from first to last."""
    xp: Any = np if known(first, last) else jnp
    first, last = first // stride, last // stride
    whole = first // size != last // size
    return xp.where(whole, 0, first % size), xp.where(whole, size - 1, last % size)
