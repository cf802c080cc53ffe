"""Masks of positions: causal, windows, grids, any function."""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha.base import checks, shapes, symbols
from flax_mha.base.coordinates import Array, At, ScoreArray, Tiles, numpy_of
from flax_mha.base.shapes import Dims
from flax_mha.masks.algebra import Mask, as_mask, evaluate, lengths_as_scores
from flax_mha.masks.states import both, tile_state
from flax_mha.sharding.shard_map import vary


class Causal(Mask):
    """A mask in which a query may attend to its own and earlier positions, j ≤ i."""

    def allowed(self, at: At) -> Array:
        return at.k <= at.q

    def tiles(self, tiles: Tiles) -> Array:
        return tile_state(tiles.k_min <= tiles.q_max, tiles.k_max <= tiles.q_min)


class Window(Mask):
    """A sliding window: a query may attend to positions i − left ≤ j ≤ i + right.

    With a limit in an array, which a scan can slice, a cache makes no ring buffer.

    Attributes:
      left: the number of earlier positions, int or an array [] or [*B] (default: all).
      right: the number of later positions (default: all).
    """

    left: int | Array | None = struct.field(pytree_node=False, default=None)
    right: int | Array | None = struct.field(pytree_node=False, default=None)

    def __new__(cls, left: int | Array | None = None, right: int | Array | None = None) -> Self:
        """Make an `ArrayWindow`, whose limits are leaves, if one of them is an array."""
        has_arrays = any(isinstance(x, jax.Array | np.ndarray) for x in (left, right))
        window: Any = super().__new__(ArrayWindow if has_arrays else cls)
        return cast(Self, window)

    def bind(self, dims: Dims) -> Self:
        def limit(name: str, x: Any) -> Any:
            # The sum of a position and a limit must fit int32.
            if x is None or not isinstance(self, ArrayWindow):
                return x if x is None else checks.integer(name, x, 0, 2**30)
            return lengths_as_scores(name, checks.integers(name, x).clip(-(2**30), 2**30), dims)

        left, right = limit("Window.left", self.left), limit("Window.right", self.right)
        return self.replace(left=left, right=right)

    def allowed(self, at: At) -> Array:
        near, (left, right) = jnp.ones((1,) * at.q.ndim, bool), self._limits
        if left is not None:
            near = near & (at.k >= at.q - left)
        if right is not None:
            near = near & (at.k <= at.q + right)
        return near

    def tiles(self, tiles: Tiles) -> Array:
        state: Array = tile_state(np.True_, np.True_)
        left, right = self._limits
        if left is not None:
            state = tile_state(tiles.k_max >= tiles.q_min - left, tiles.k_min >= tiles.q_max - left)
        if right is not None:
            some = tiles.k_min <= tiles.q_max + right
            state = both(state, tile_state(some, tiles.k_max <= tiles.q_min + right))
        return state

    def max_lookback(self) -> int | None:
        return self.left if isinstance(self.left, int) else None

    @property
    def _limits(self) -> list[Any]:
        return [x.array if isinstance(x, ScoreArray) else x for x in (self.left, self.right)]


class ArrayWindow(Window):
    """A window whose limits are arrays, as leaves of the tree. `Window` makes it."""

    left: Any = None
    right: Any = None


class Predicate(Mask):
    """A user-defined mask, fn(row, head, i, j, *args).

    Attributes:
      fn: a function that returns True where the query may attend to the key. It gets four integer
        arrays (the indices of row and head, the positions of query and key), then args.
      args: arrays and numbers for fn, which may not close over traced arrays.
    """

    fn: Callable[..., jax.Array] = struct.field(pytree_node=False)
    args: tuple[jax.Array, ...] = ()

    def bind(self, dims: Dims) -> Self:
        return self.replace(args=checks.arguments(self.args))

    def allowed(self, at: At) -> Array:
        return self.fn(at.row, at.head, at.q, at.k, *self.args)


class PerHead(Mask):
    """A mask for each query head.

    Attributes:
      masks: N masks.
    """

    masks: Sequence[Mask]

    def bind(self, dims: Dims) -> Self:
        if len(self.masks) != dims.N:
            raise ValueError(
                f"PerHead.masks must have a mask for each of the {dims.N} query heads, got "
                f"{len(self.masks)}; pass one mask for all heads without PerHead"
            )
        return self.replace(masks=tuple(as_mask(mask).bind(dims) for mask in self.masks))

    def allowed(self, at: At) -> Array:
        shape = jnp.broadcast_shapes(*(x.shape for x in at))

        def evaluate_all(mask: Mask) -> jax.Array:
            # Inside `jax.shard_map`, branches must vary over the same mesh axes.
            return vary(jnp.broadcast_to(evaluate(mask, at), shape), (self.masks, at))

        if at.head.size == 1:
            branches = [lambda m=m: evaluate_all(m) for m in self.masks]
            return jax.lax.switch(at.head.reshape(()), branches)
        table = evaluate_all(self.masks[0])
        for head, mask in enumerate(self.masks[1:], 1):
            table = jnp.where(at.head == head, evaluate_all(mask), table)
        return table

    def tiles(self, tiles: Tiles) -> Array:
        states = [shapes.lead(mask.tiles(tiles), tiles.q_min.ndim) for mask in self.masks]
        if tiles.heads is not None:
            table = jnp.asarray(states[0])
            for head, state in enumerate(states[1:], 1):
                table = jnp.where(tiles.heads == head, state, table)
            return table
        states = [x[..., i : i + 1, :, :] if x.shape[-3] > 1 else x for i, x in enumerate(states)]
        shape = jnp.broadcast_shapes(*(state.shape for state in states))
        xp = jnp if symbols.is_symbolic(*shape) else numpy_of(*states)
        return xp.concatenate([xp.broadcast_to(state, shape) for state in states], axis=-3)


class Dilated(Mask):
    """A mask in which a query may attend to every n-th position, (i − j) mod n = 0.

    >>> mask = Causal() & Window(left=7 * 4) & Dilated(4)  # 8 keys, every fourth

    Attributes:
      step: n.

    Source: Child et al., "Generating Long Sequences with Sparse Transformers", 2019.
    """

    step: int = struct.field(pytree_node=False)

    def bind(self, dims: Dims) -> Self:
        checks.integer("Dilated.step", self.step, 1)
        return self

    def allowed(self, at: At) -> Array:
        return (at.q - at.k) % self.step == 0

    def tiles(self, tiles: Tiles) -> Array:
        low, high = tiles.q_min - tiles.k_max, tiles.q_max - tiles.k_min
        some = high // self.step * self.step >= low
        return tile_state(some, (low == high) & some if self.step > 1 else some)


class Neighborhood(Mask):
    """A window on a grid of tokens, of the same size at the border as inside.

    On an axis of n tokens, a query at c may attend to the w keys from min(max(c − ⌊w/2⌋, 0), n − w)
    on. Tokens are in row-major order.

    Attributes:
      sizes: the tokens on each axis: (height, width), or (frames, height, width).
      window: w for each axis, or one number for all.

    Source: Hassani et al., "Neighborhood Attention Transformer", 2023.
    """

    sizes: Sequence[int] = struct.field(pytree_node=False)
    window: int | Sequence[int] = struct.field(pytree_node=False)

    def bind(self, dims: Dims) -> Self:
        sizes = tuple(checks.integer("a size of Neighborhood", x) for x in self.sizes)
        window = (self.window,) * len(sizes) if isinstance(self.window, int) else self.window
        window = tuple(checks.integer("a window of Neighborhood", x, 1) for x in window)
        if len(sizes) != len(window) or not all(map(operator.le, window, sizes)):
            raise ValueError(
                f"Neighborhood.window must be from 1 to the sizes {sizes} for each axis, got "
                f"{window}; change it"
            )
        if math.prod(sizes) < max(dims.T, dims.S):
            raise ValueError(
                f"Neighborhood.sizes must have at least T={dims.T} and S={dims.S} tokens in all, "
                f"got {sizes} of {math.prod(sizes)}; give the grid of all tokens"
            )
        return self.replace(sizes=sizes, window=window)

    def _axes(self) -> Iterator[tuple[int, int, int]]:
        """Yield the size, window and stride of each axis."""
        window: Any = self.window  # Bound masks have one for each axis.
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
        state: Array = tile_state(np.True_, np.True_)
        for size, window, stride in self._axes():
            q_min, q_max = _span(tiles.q_min, tiles.q_max, stride, size)
            k_min, k_max = _span(tiles.k_min, tiles.k_max, stride, size)
            low, high = (_first(x, size, window) for x in (q_min, q_max))
            some = (k_max >= low) & (k_min < high + window)
            state = both(state, tile_state(some, (k_min >= high) & (k_max < low + window)))
        return state


def _first(c: Array, size: int, window: int) -> Array:
    """Return the first coordinate of the window of a query at c."""
    return (c - window // 2).clip(0, size - window)


def _span(first: Array, last: Array, stride: int, size: int) -> tuple[Array, Array]:
    """Return the least and greatest coordinate on an axis of tokens first … last."""
    xp = numpy_of(first, last)
    first, last = first // stride, last // stride
    wraps = first // size != last // size
    return xp.where(wraps, 0, first % size), xp.where(wraps, size - 1, last % size)
