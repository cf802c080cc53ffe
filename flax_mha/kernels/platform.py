"""What a call will run on, as kernels are told: none of them asks for devices or a mesh."""

from typing import NamedTuple


class Platform(NamedTuple):
    """What a call will run on.

    Attributes:
      name: JAX's name of the platform: "cpu", "gpu" or "tpu".
      device: what JAX calls the kind of device, such as "NVIDIA H200".
      cudnn: the version of cuDNN, such as (9, 20, 0); None for the one that is installed.
      undivided: why a kernel that XLA can't divide between devices must not run; None where there
        is one device, or each runs its own shard.
      spread: whether XLA divides the call between several devices as it likes: no mesh says how.
    """

    name: str
    device: str = ""
    cudnn: tuple[int, int, int] | None = None
    undivided: str | None = None
    spread: bool = False
