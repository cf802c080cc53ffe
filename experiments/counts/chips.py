"""What the chips can do: the constants of every estimate, in one table.

| constant | what it is |
|---|---|
| `memory` | bytes of HBM on a chip |
| `bandwidth` | bytes a second between HBM and the chip |
| `flops` | operations a second of products in bfloat16 |
| `link` | bytes a second through one link between chips, one way |
| `wraps` | for which size an axis of the torus is a ring, from its last chip to the first again |

Sources, read in November 2026: cloud.google.com/tpu/docs, the page of each generation. For `link`
its bidirectional bandwidth of a chip (v5e 400, v5p 1200, v6e 800, TPU7x 1200 GB/s) by 2, and by
the links, of which a chip has 2 along each axis; v4: Jouppi et al., "TPU v4", 2023. Axes are rings
at 16 on v5e and v6e (a whole pod), elsewhere where they are multiples of 4 (the page of v4).

NVIDIA's GPUs, in machines of eight:

| constant | what it is |
|---|---|
| `link` | bytes a second of a GPU's NVLinks together, one way |
| `network` | bytes a second from a GPU to other machines, one way |

Sources: for `flops` (bfloat16, dense) and `link` (half of what is said for both ways) NVIDIA's data
sheets of A100 80GB SXM, H100 SXM, H200 SXM and HGX B200; for `network` one adapter for each GPU, as
in DGX A100 (200 Gbit/s), H100, H200 and B200 (400 Gbit/s); for `memory`
and `bandwidth` what the driver reports of them, as XLA's descriptions have it (see `gpus`).

A device of JAX is a chip, or on v4 and TPU7x one of a chip's two cores, which share all of these.
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


class Gpu(NamedTuple):
    """See the tables above."""

    memory: float
    bandwidth: float
    flops: float
    link: float
    network: float


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
GPUS = {
    "NVIDIA A100-SXM4-80GB": Gpu(85100068864, 2039.04e9, 312e12, 300e9, 25e9),
    "NVIDIA H100 80GB HBM3": Gpu(84942979072, 3352.32e9, 989e12, 450e9, 50e9),
    "NVIDIA H200": Gpu(151397597184, 4800e9, 989e12, 450e9, 50e9),
    "NVIDIA B200": Gpu(191514411008, 7672.32e9, 2250e12, 900e9, 50e9),
}
