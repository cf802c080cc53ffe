"""What the chips can do: the constants of every estimate, in one table.

| constant | what it is | source |
|---|---|---|
| `memory` | bytes of HBM on a chip | cloud.google.com/tpu/docs, the page of each generation |
| `bandwidth` | bytes a second between HBM and the chip | the same |
| `flops` | operations a second of products in bfloat16 | the same |
| `link` | bytes a second through one link, one way: the page's bidirectional bandwidth of a chip | \
the same; v4: Jouppi et al., "TPU v4", 2023 |
| | by its links, 2 along each axis of the torus, and by 2 | |
| `wraps` | sizes of which an axis is a ring, from a chip to the first again | v5e, v6e: a whole \
pod's 16; others: multiples of 4, cloud.google.com/tpu/docs/v4 |

Read in November 2026. A device of JAX is a chip, or on v4 and TPU7x one of a chip's two cores: then
half of these, save `link`, are its own.
"""

from collections.abc import Callable
from typing import NamedTuple

GIB = 2**30


class Chip(NamedTuple):
    """See the table above."""

    memory: float
    bandwidth: float
    flops: float
    link: float
    wraps: Callable[[int], bool]


def _whole_pod(size: int) -> bool:
    return size == 16


def _cubes(size: int) -> bool:
    return size % 4 == 0


# By JAX's `device_kind`.
CHIPS = {
    "TPU v4": Chip(32 * GIB, 1200e9, 275e12, 50e9, _cubes),
    "TPU v5 lite": Chip(16 * GIB, 819e9, 197e12, 50e9, _whole_pod),
    "TPU v5": Chip(95 * GIB, 2765e9, 459e12, 100e9, _cubes),
    "TPU v6 lite": Chip(32 * GIB, 1600e9, 918e12, 100e9, _whole_pod),
    "TPU7x": Chip(192 * GIB, 7380e9, 2307e12, 100e9, _cubes),
}
