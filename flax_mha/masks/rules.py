"""The masks by name."""

from collections.abc import Callable, Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha import inputs, shapes, symbols
from flax_mha.grid import Array, At, Tiles
from flax_mha.masks.base import Mask, as_mask, farthest, seen
from flax_mha.masks.tiles import both, judge, known
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
            if reach is None:
                continue
            inputs.concrete(f"Window.{name}", reach)
            if isinstance(reach, bool) or not isinstance(reach, int):
                raise TypeError(f"Window.{name} must be an int or None, got {reach!r}")
            # Positions and what is added to them have to fit int32 together.
            if not 0 <= reach < 2**30:
                raise ValueError(
                    f"Window.{name} must be at least 0 and below 2³⁰, got {reach}; None is no limit"
                )
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
        each = [shapes.lead(mask.tiles(tiles), tiles.q_min.ndim) for mask in self.masks]
        if tiles.heads is not None:
            table = jnp.asarray(each[0])
            for head, verdict in enumerate(each[1:], 1):
                table = jnp.where(tiles.heads == head, verdict, table)
            return table
        each = [x[..., i : i + 1, :, :] if x.shape[-3] > 1 else x for i, x in enumerate(each)]
        shape = jnp.broadcast_shapes(*(verdict.shape for verdict in each))
        xp = np if known(*each) and not symbols.is_symbolic(*shape) else jnp
        return xp.concatenate([xp.broadcast_to(verdict, shape) for verdict in each], axis=-3)

    def reach(self) -> int | None:
        """See `Mask.reach`."""
        return farthest(self.masks)
