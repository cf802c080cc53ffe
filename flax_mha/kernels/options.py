"""The arguments of an attention call that do not change what it returns, for type checkers."""

from collections.abc import Sequence
from typing import Literal, TypeAlias, TypedDict

import jax

from flax_mha import masks
from flax_mha.grid import Array
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
