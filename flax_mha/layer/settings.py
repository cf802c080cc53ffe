"""The settings of a layer, and the arguments of a call, as values."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict

import flax.linen as nn
import jax
from flax.typing import Dtype, PrecisionLike

from flax_mha import masks
from flax_mha.base import checks
from flax_mha.base.coordinates import Array
from flax_mha.cache.sources import Given
from flax_mha.kernels import KernelName
from flax_mha.kernels.call.normalizers import SOFTMAX
from flax_mha.layer.qk_norm import QKNorm
from flax_mha.positions import Rotation
from flax_mha.scores import ScoreMod
from flax_mha.signatures.attention_fn import attention_fn
from flax_mha.taps.tap import Tap

ZEROS = nn.initializers.zeros_init()
PROJECTIONS = ("query", "key", "value", "out", "output_gate")


def has_bias(use_bias: bool | Sequence[str], name: str) -> bool:
    """Return True if a layer's field `use_bias` gives a bias to the projection `name`."""
    if not isinstance(use_bias, list | tuple):
        return checks.flag("use_bias", use_bias)
    if not set(use_bias) <= {*PROJECTIONS}:
        raise ValueError(
            f"use_bias must be True, False, or names of projections, of {list(PROJECTIONS)}, got "
            f"{use_bias!r}"
        )
    return name in use_bias


def check_module(name: str, module: Any, cls: type[nn.Module]) -> None:
    """Check that a field is a module of a class, because its fields are read."""
    if not isinstance(module, cls):
        raise TypeError(
            f"{name} must be a flax_mha.{cls.__name__}, got {type(module).__name__}; "
            f"build one with the options of yours"
        )


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Settings:
    """The fields of a layer that its computation reads, described in `MultiHeadAttention`.

    Layers of linen and nnx inherit from it, so that the functions of `core` take them.
    """

    # First, so that a subclass may give any later field another default.
    num_heads: int = dataclasses.field(kw_only=False)
    dtype: Dtype | None = None
    precision: PrecisionLike = None
    rotary: Rotation | None = None
    mask: masks.MaskLike | None = None
    scale: float | Literal["learned"] | None = None
    kernel: KernelName = "auto"
    dropout_rate: float = 0.0
    broadcast_dropout: bool = False
    attention_fn: Callable[..., Any] | None = attention_fn
    force_fp32_for_softmax: bool = False
    qk_norm: QKNorm | None = None
    normalizer: str = SOFTMAX
    exclusive: bool = False

    @property
    def custom_attention(self) -> Callable[..., Any] | None:
        """The function that computes attention instead of the kernels, or None."""
        return None if self.attention_fn is attention_fn else self.attention_fn


class CallOptions(TypedDict, total=False):
    """The arguments that calls of linen and nnx layers share.

    They are described in `MultiHeadAttention.__call__`. The type of the result depends on
    `return_weights` and `return_kv`, which are not here.
    """

    mask: masks.MaskLike | None
    bias: jax.Array | None
    scores: Sequence[ScoreMod]
    positions: jax.Array | tuple[jax.Array, jax.Array] | None
    head_mask: jax.Array | None
    lengths: jax.Array | None
    order: Array | None
    kv: Given | None
    deterministic: bool | None
    sow_weights: bool


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of one call beside its inputs, described in `MultiHeadAttention.__call__`.

    Attributes:
      scores: the scores of the layer, with their parameters, and those of the call.
      attention: a function in place of `dot_product_attention`, called as that is, with keys and
        values of a cache as `Stored`.
      scale: the scale of the scores, in place of the layer's.
      dropout_rng: a key for dropout, or None for no dropout.
      return_weights: True to return the weights.
      tap: the named tensors of the call to change, read or list.
    """

    mask: masks.MaskLike | None = None
    bias: jax.Array | None = None
    scores: Sequence[ScoreMod] = ()
    positions: jax.Array | tuple[jax.Array, jax.Array] | None = None
    head_mask: jax.Array | None = None
    lengths: jax.Array | None = None
    order: Array | None = None
    attention: Callable[..., Any] | None = None
    scale: float | None = None
    dropout_rng: jax.Array | None = None
    return_weights: bool = False
    tap: Tap = dataclasses.field(default_factory=Tap)
