"""The settings of a layer, and the arguments of a call, as values."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer, PrecisionLike

from flax_mha import masks
from flax_mha.base import checks
from flax_mha.base.coordinates import Array
from flax_mha.cache import CacheConfig
from flax_mha.cache.resolve import KVLike
from flax_mha.kernels import Capture
from flax_mha.kernels.call.normalizers import SOFTMAX
from flax_mha.layer.qk_norm import QKNorm
from flax_mha.positions import Rotation
from flax_mha.scores import ScoreMod
from flax_mha.signatures.attention_fn import attention_fn
from flax_mha.taps.tap import Tap

ZEROS = nn.initializers.zeros_init()
# Fields of linen and nnx layers that do not change the function of the parameters that is read. A
# function that reads a layer adds those that it handles.
NEUTRAL = (
    "num_heads", "in_features", "qkv_features", "out_features", "num_kv_heads", "in_kv_features",
    "head_dim", "v_head_dim", "mask", "kernel", "dropout_rate", "broadcast_dropout",
    "deterministic", "decode", "cache", "capture", "use_bias", "dtype", "param_dtype", "precision",
    "kernel_init", "out_kernel_init", "bias_init", "out_bias_init", "force_fp32_for_softmax",
    "partitioned",
)  # fmt: skip
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


def unhandled(layer: Any, handled: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields that a function which handles `NEUTRAL` and `handled` must refuse."""
    default = ("attention_fn",) if layer.custom_attention is None else ()
    return checks.unhandled(layer, (*NEUTRAL, *handled, *default))


def check_module(name: str, module: Any, cls: type[nn.Module]) -> None:
    """Check that a field is a module of a class, because its fields are read."""
    if not isinstance(module, cls):
        raise TypeError(
            f"{name} must be a flax_mha.{cls.__name__}, got {type(module).__name__}; "
            f"build one with the options of yours"
        )


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Settings:
    """The fields that the layers of linen and nnx share, in the order in which they are shown.

    They are described in `MultiHeadAttention`. The functions of `core` read a part of them.
    """

    # First, so that a subclass may give any later field another default.
    num_heads: int = dataclasses.field(kw_only=False)
    head_dim: int | None = None
    v_head_dim: int | None = None
    mask: masks.MaskLike | None = None
    rotary: Rotation | None = None
    scores: Sequence[ScoreMod] = ()
    scale: float | Literal["learned"] | None = None
    sinks: bool = False
    normalizer: str = SOFTMAX
    kernel: str = "auto"
    dropout_rate: float = 0.0
    broadcast_dropout: bool = False
    deterministic: bool | None = None
    decode: bool | None = False
    cache: CacheConfig | None = None
    capture: Capture | None = None
    qk_norm: QKNorm | None = None
    gate: str | None = None
    exclusive: bool = False
    use_bias: bool | Sequence[str] = True
    project_out: bool = True
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = nn.linear.default_kernel_init
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = ZEROS
    out_bias_init: Initializer | None = None
    # Fields that are here for models of Flax's layers.
    normalize_qk: bool = False
    attention_fn: Callable[..., Any] | None = attention_fn
    force_fp32_for_softmax: bool = False
    # None alone, see `base.arguments`.
    qkv_dot_general: None = dataclasses.field(default=None, repr=False)
    out_dot_general: None = dataclasses.field(default=None, repr=False)
    qkv_dot_general_cls: None = dataclasses.field(default=None, repr=False)
    out_dot_general_cls: None = dataclasses.field(default=None, repr=False)
    qk_attn_weights_einsum_cls: None = dataclasses.field(default=None, repr=False)
    attn_weights_value_einsum_cls: None = dataclasses.field(default=None, repr=False)

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
    positions: jax.Array | tuple[jax.Array | None, jax.Array | None] | None
    head_mask: jax.Array | None
    lengths: jax.Array | None
    order: Array | None
    kv: KVLike | None
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
    positions: jax.Array | tuple[jax.Array | None, jax.Array | None] | None = None
    head_mask: jax.Array | None = None
    lengths: jax.Array | None = None
    order: Array | None = None
    attention: Callable[..., Any] | None = None
    scale: float | None = None
    dropout_rng: jax.Array | None = None
    return_weights: bool = False
    tap: Tap = dataclasses.field(default_factory=Tap)
