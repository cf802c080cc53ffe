"""The passes around a ring, and their legs: steps that one compiled loop can run."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np


class Pass(NamedTuple):
    """Steps in which the same keys of each device's block pass around.

    Attributes:
      steps: the ring offsets.
      start: the first of these keys in a block.
      stop: the end of these keys in a block.
    """

    steps: tuple[int, ...]
    start: int
    stop: int

    def of(self, x: jax.Array) -> jax.Array:
        """Return these keys of a block [*B, S/n, K, ·]."""
        return x[..., self.start : self.stop, :, :]

    def pad(self, x: jax.Array, size: int) -> jax.Array:
        """Return these keys among the `size` keys of a block, and 0 for the others."""
        none = (0, 0)
        around = (self.start, size - self.stop)
        return jnp.pad(x, (*(none,) * (x.ndim - 3), around, none, none))


# The maximum number of parts, because each is compiled separately. A window has one on each side.
_PARTS = 2


def split(reach: Mapping[int, tuple[int, int]], size: int, n: int) -> tuple[Pass, ...]:
    """Return the passes around n devices for blocks of `size` keys, the pass of whole blocks first.

    `reach` has the first key and the end of the keys that any device sees in a step, by offset. A
    part of a block goes from its owner straight to its device, if less data then crosses the links
    between
    neighbors: not if the whole block passes by on its way to others.
    """

    def crossing(parts: Sequence[int]) -> int:
        hops = np.diff([0, *(step for step in reach if step not in parts)])
        direct = sum((reach[s][1] - reach[s][0]) * min(s, n - s) for s in parts)
        return size * int(np.minimum(hops, n - hops).sum()) + direct

    parts: list[int] = []
    partial = [step for step in reach if reach[step] != (0, size)]
    for step in sorted(partial, key=lambda step: -min(step, n - step)):
        if len(parts) < _PARTS and crossing([*parts, step]) < crossing(parts):
            parts.append(step)
    whole = tuple(step for step in reach if step not in parts)
    return Pass(whole, 0, size), *(Pass((step,), *reach[step]) for step in parts)


# Consecutive steps with equal hops, which one loop can run: their ring offsets, how many devices
# sums move forward before a step, and how many devices blocks move forward after it.
Leg: TypeAlias = tuple[tuple[int, ...], int, int]


def schedule(steps: Sequence[int], n: int) -> list[Leg]:
    """Return the legs of a pass around n devices, in order. Only the first step can be 0."""
    # A loop's carry has fixed arrays, so a loop starts when sums already pass around.
    hops = (np.diff([0, *steps, *steps[-1:]]) % n).tolist()
    travelling = 2 if 0 in steps else 1
    legs: list[Leg] = []
    for t, step in enumerate(steps):
        hop, following = hops[t], hops[t + 1]
        together = legs.pop()[0] if t > travelling and legs[-1][1:] == (hop, following) else ()
        legs.append(((*together, step), hop, following))
    return legs
