"""The arguments of an attention call that do not change what it returns, for type checkers."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias, TypedDict

import jax

from flax_mha import masks
from flax_mha.base.coordinates import Array
from flax_mha.kernels.stored import Stored
from flax_mha.scores import ScoreMod

Keyed: TypeAlias = Array | Stored
# The names of kernels: alone, of ways to the keys of other devices, and of both.
KernelName: TypeAlias = Literal[
    "auto", "cudnn", "splash", "flex", "blockwise", "checkpointed", "reference", "decode",
    "ulysses", "ring", "all_gather",
    "ulysses:cudnn", "ulysses:splash", "ulysses:flex",
    "ulysses:blockwise", "ulysses:checkpointed", "ulysses:reference", "ulysses:decode",
    "ring:cudnn", "ring:splash", "ring:flex",
    "ring:blockwise", "ring:checkpointed", "ring:reference", "ring:decode",
    "all_gather:cudnn", "all_gather:splash", "all_gather:flex",
    "all_gather:blockwise", "all_gather:checkpointed", "all_gather:reference", "all_gather:decode",
]  # fmt: skip


class Options(TypedDict, total=False):
    """See `flax_mha.dot_product_attention`."""

    mask: masks.MaskLike | None
    bias: Array | None
    scores: Sequence[ScoreMod]
    sinks: Array | None
    scale: float | Array | None
    dropout_rate: float
    dropout_rng: jax.Array | None
    broadcast_dropout: bool
    q_positions: Array | int | None
    kv_positions: Array | int | None
    precision: jax.lax.PrecisionLike
    normalizer: str


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
