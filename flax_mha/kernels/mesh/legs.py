"""The legs of a pass around a ring: steps that one compiled loop can run."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Leg(NamedTuple):
    """Consecutive steps with equal hops: one step, or the steps of a loop.

    Attributes:
      steps: the ring offsets.
      hop: the devices that sums move forward before a step of the leg.
      following: the devices that blocks move forward after a step of the leg.
    """

    steps: tuple[int, ...]
    hop: int
    following: int


def schedule(steps: Sequence[int], n: int) -> list[Leg]:
    """Return the legs of a pass around n devices, in order. Only the first step may be 0."""
    # A loop's carry has fixed arrays, so a loop starts when sums already pass around.
    hops = (np.diff([0, *steps, *steps[-1:]]) % n).tolist()
    travelling = 2 if 0 in steps else 1
    legs: list[Leg] = []
    for t, step in enumerate(steps):
        leg = Leg((step,), hops[t], hops[t + 1])
        if t > travelling and legs[-1][1:] == leg[1:]:
            leg = leg._replace(steps=(*legs.pop().steps, step))
        legs.append(leg)
    return legs
