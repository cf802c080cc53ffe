"""What a layer is set to, and what one call of it says, as values."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer, PrecisionLike

from flax_mha import masks
from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import Array
from flax_mha.cache import CacheConfig
from flax_mha.cache.sources import Given
from flax_mha.kernels import Capture, KernelName
from flax_mha.kernels.normalizers import SOFTMAX
from flax_mha.layer.qk_norm import QKNorm
from flax_mha.positions import Rotation
from flax_mha.scores import ScoreMod

ZEROS = nn.initializers.zeros_init()
PROJECTIONS = ("query", "key", "value", "out", "output_gate")


def has_bias(use_bias: bool | Sequence[str], name: str) -> bool:
    """Whether the projection of that name has a bias, by a layer's field."""
    if not isinstance(use_bias, list | tuple):
        return checks.flag("use_bias", use_bias)
    if not set(use_bias) <= {*PROJECTIONS}:
        raise ValueError(
            f"use_bias must be True, False, or names of projections, of {list(PROJECTIONS)}, got "
            f"{use_bias!r}"
        )
    return name in use_bias


def learns_scale(scale: Any) -> bool:
    """Whether a layer's field `scale` says so."""
    if isinstance(scale, str) and scale != "learned":
        raise ValueError(f"scale must be a number or 'learned', got {scale!r}")
    return isinstance(scale, str)


def gate_features(gate: str | None, N: int, Hv: int) -> shapes.Shape:
    """The features of a layer's gate; none of no gate."""
    if gate is None:
        return ()
    return checks.choice("gate", gate, {"head": (N, 1), "feature": (N, Hv)})


def check_module(name: str, module: Any, cls: type[nn.Module]) -> None:
    """The field of that name must be a module of that kind, whose own fields are read."""
    if not isinstance(module, cls):
        raise TypeError(
            f"{name} must be a flax_mha.{cls.__name__}, got {type(module).__name__}; "
            f"build one with the options of yours"
        )


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Settings:
    """The fields of a layer that its computation reads, see `MultiHeadAttention`.

    A layer of linen or nnx is one, so that the functions of `core` take it as it is.
    """

    dtype: Dtype | None = None
    precision: PrecisionLike = None
    rotary: Rotation | None = None
    mask: masks.MaskLike | None = None
    scale: float | Literal["learned"] | None = None
    kernel: KernelName = "auto"
    dropout_rate: float = 0.0
    broadcast_dropout: bool = False
    attention_fn: Callable[..., Any] | None = None
    force_fp32_for_softmax: bool = False
    qk_norm: QKNorm | None = None
    normalizer: str = SOFTMAX


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Fields(Settings):
    """The fields that layers of linen and nnx share, see `MultiHeadAttention`."""

    param_dtype: Dtype = jnp.float32
    deterministic: bool | None = None
    kernel_init: Initializer = nn.linear.default_kernel_init
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = ZEROS
    out_bias_init: Initializer | None = None
    use_bias: bool | Sequence[str] = True
    cache: CacheConfig | None = None
    normalize_qk: bool = False
    head_dim: int | None = None
    v_head_dim: int | None = None
    project_out: bool = True
    scores: Sequence[ScoreMod] = ()
    sinks: bool = False
    capture: Capture | None = None
    gate: str | None = None


class CallOptions(TypedDict, total=False):
    """The arguments that calls of the linen and the nnx layer share, for type checkers.

    `return_weights` and `return_kv` are not here: the type of the result depends on them.
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
    """What one call says beside its inputs; see `MultiHeadAttention` for those not named here.

    Attributes:
      scores: those of the layer, with their parameters, and then those of the call.
      attention: the function that computes attention, called as `dot_product_attention` is, with
        keys and values of a cache as `Stored` (default: `dot_product_attention`).
      scale: of the scores, in place of the layer's; None for that.
      dropout_rng: a key, if there is to be dropout.
      return_weights: whether to give the weights.
      capture: what to look at.
      sower: the module that an `attention_fn` sows weights into.
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
    capture: Capture | None = None
    sower: Any = None


def captured(
    capture: Capture | None, sow_weights: bool, listened: bool, attention_fn: Any
) -> Capture | None:
    """What a call of a layer with that `capture` captures, if anybody listens.

    An `attention_fn` sows weights by itself, and refuses the rest.
    """
    if attention_fn is not None:
        return capture
    if not listened:
        return None
    if sow_weights and capture is None:
        return Capture(("weights",))
    if sow_weights and capture is not None and "weights" not in capture.what:
        return dataclasses.replace(capture, what=(*capture.what, "weights"))
    return capture
