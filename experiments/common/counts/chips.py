"""The constants of the chips, for every estimate.

| constant | meaning |
|---|---|
| `memory` | bytes of HBM on a chip |
| `bandwidth` | bytes per second between HBM and the chip |
| `flops` | operations per second of bfloat16 matmuls |
| `link` | bytes per second through one link between chips, one way |
| `network` | bytes per second from a chip to other slices (DCN), one way; 0 if unknown |
| `ring` | an axis of the torus is a ring if its size is a multiple of this; 0 for never |

Sources, read in November 2026: cloud.google.com/tpu/docs, the page of each generation. `link` is
the page's bidirectional bandwidth of a chip (v5e 400, v5p 1200, v6e 800, TPU7x 1200 GB/s) divided
by 2, and by the chip's 2 links along each axis. `network` is the page's DCN bandwidth of a chip
(v5p 50, v6e and TPU7x 100 Gbit/s), or of a pod (v5e 6.4 Tbit/s) divided by its 256 chips; the page
of v4 has none. For v4's `link`: Jouppi et al., "TPU v4", 2023. Axes are
rings at 16 on v5e and v6e (a whole pod), and at multiples of 4 elsewhere (the page of v4).

NVIDIA GPUs, in machines of eight:

| constant | meaning |
|---|---|
| `link` | bytes per second of all NVLinks of a GPU, one way |
| `network` | bytes per second from a GPU to other machines, one way |

Sources: `flops` (bfloat16, dense) and `link` (half of the bidirectional figure) are from NVIDIA's
data sheets of A100 80GB SXM, H100 SXM, H200 SXM and HGX B200. `network` is one adapter per GPU, as
in DGX A100 (200 Gbit/s), H100, H200 and B200 (400 Gbit/s). `memory` and `bandwidth` are the values
that the driver reports, from XLA's descriptions (see `gpus`).

A device of JAX is a chip, or on v4 and TPU7x one of a chip's two cores, which share all of these.
"""

from typing import NamedTuple

GIB = 2**30


class Chip(NamedTuple):
    """The constants of a TPU chip or of a GPU, as in the tables of this module."""

    memory: float
    bandwidth: float
    flops: float
    link: float
    network: float
    ring: int = 0


# By JAX's `device_kind`.
CHIPS = {
    "TPU v4": Chip(32 * GIB, 1200e9, 275e12, 50e9, 0.0, 4),
    "TPU v5 lite": Chip(16 * GIB, 819e9, 197e12, 50e9, 3.125e9, 16),
    "TPU v5": Chip(95 * GIB, 2765e9, 459e12, 100e9, 6.25e9, 4),
    "TPU v6 lite": Chip(32 * GIB, 1600e9, 918e12, 100e9, 12.5e9, 16),
    "TPU7x": Chip(192 * GIB, 7380e9, 2307e12, 100e9, 12.5e9, 4),
}
GPUS = {
    "NVIDIA A100-SXM4-80GB": Chip(85100068864, 2039.04e9, 312e12, 300e9, 25e9),
    "NVIDIA H100 80GB HBM3": Chip(84942979072, 3352.32e9, 989e12, 450e9, 50e9),
    "NVIDIA H200": Chip(151397597184, 4800e9, 989e12, 450e9, 50e9),
    "NVIDIA B200": Chip(191514411008, 7672.32e9, 2250e12, 900e9, 50e9),
}
