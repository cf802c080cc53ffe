"""A layer's fields and its table of parameters, and the arguments of a call."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer, PrecisionLike

from flax_mha import masks
from flax_mha.base import checks, shapes
from flax_mha.base.arguments import check_given
from flax_mha.base.coordinates import Array
from flax_mha.cache import CacheConfig
from flax_mha.kernels import Capture
from flax_mha.kernels.call.capture import as_capture
from flax_mha.kernels.call.normalizers import SOFTMAX
from flax_mha.layer.linear import default_bias_init, default_kernel_init
from flax_mha.layer.parameters import ArrayEntry, LinearEntry, NormEntry, Table
from flax_mha.layer.qk_norm import QKNorm
from flax_mha.positions import Rotation
from flax_mha.scores import ScoreMod
from flax_mha.signatures.attention_fn import attention_fn
from flax_mha.taps.tap import Tap, capture_of

ZEROS = default_bias_init
# A field for which only None is accepted, see `base.arguments`.
_refused = functools.partial(dataclasses.field, default=None, repr=False)
# Fields that do not change what a layer computes from its parameters.
NEUTRAL = (
    "num_heads", "qkv_features", "out_features", "num_kv_heads", "head_dim", "v_head_dim", "mask",
    "kernel", "dropout_rate", "broadcast_dropout", "deterministic", "decode", "cache", "capture",
    "use_bias", "dtype", "param_dtype", "precision", "kernel_init", "out_kernel_init", "bias_init",
    "out_bias_init", "force_fp32_for_softmax", "partitioned",
)  # fmt: skip
PROJECTIONS = ("query", "key", "value", "out", "output_gate")


def has_bias(use_bias: bool | Sequence[str], name: str) -> bool:
    """Return whether the projection `name` has a bias, by a layer's field `use_bias`."""
    if not isinstance(use_bias, list | tuple):
        return checks.flag("use_bias", use_bias)
    if not set(use_bias) <= {*PROJECTIONS}:
        raise ValueError(
            f"use_bias must be True, False, or names of projections, of {list(PROJECTIONS)}, got "
            f"{use_bias!r}"
        )
    return name in use_bias


def unhandled(layer: Any, handled: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields that a function must refuse if it handles only `NEUTRAL` and `handled`."""
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
    """The fields of a layer, and the table of its parameters.

    `MultiHeadAttention` inherits and describes the fields. The functions of `core` need no module:
    `Settings(8)` is enough.
    """

    # First, so that a subclass can give any later field another default.
    num_heads: int = dataclasses.field(kw_only=False)
    qkv_features: int | None = None
    out_features: int | None = None
    num_kv_heads: int | None = None
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
    kernel_init: Initializer = default_kernel_init
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = ZEROS
    out_bias_init: Initializer | None = None
    # Fields for models that were written for Flax's layers.
    normalize_qk: bool = False
    attention_fn: Callable[..., Any] | None = attention_fn
    force_fp32_for_softmax: bool = False
    partitioned: bool = False
    qkv_dot_general: None = _refused()
    out_dot_general: None = _refused()
    qkv_dot_general_cls: None = _refused()
    out_dot_general_cls: None = _refused()
    qk_attn_weights_einsum_cls: None = _refused()
    attn_weights_value_einsum_cls: None = _refused()

    @property
    def custom_attention(self) -> Callable[..., Any] | None:
        """The function that computes attention instead of the kernels, or None."""
        return None if self.attention_fn is attention_fn else self.attention_fn

    @property
    def mixes_heads(self) -> bool:
        """True if a head's output depends on other heads, so that none can be removed by itself."""
        return self.qk_norm is not None and self.qk_norm.over_heads

    @property
    def score_heads(self) -> int:
        """The number of heads of scores and weights."""
        return self.num_heads

    def check_fields(self) -> None:
        """Check the fields as far as no inputs are needed."""
        check_given(type(self).__name__, vars(self))
        checks.fields(self)
        as_capture(self.capture, in_layer=True)
        if self.decode and self.cache is not None:
            self.cache.window(self.mask)

    def sizes(self, features: int) -> tuple[int, int, int, int]:
        """Return N, K, H and Hv, for inputs_q with this number of features."""
        return shapes.head_sizes(
            features, self.num_heads, self.num_kv_heads, self.qkv_features, self.head_dim,
            self.v_head_dim,
        )  # fmt: skip

    def table(self, D: int, Dk: int, Dv: int) -> Table:
        """Return the parameters, in the order in which they are drawn.

        Args:
          D: the features of inputs_q.
          Dk: the features of inputs_k; 0 where no keys are projected.
          Dv: the features of inputs_v; 0 where no values are projected.
        """
        N, K, H, Hv = self.sizes(D)
        entries: Table = {"query": self.to_heads("query", D, (N, H))}
        if Dk and Dv:
            entries["key"] = self.to_heads("key", Dk, (K, H), "kv_heads")
            entries["value"] = self.to_heads("value", Dv, (K, Hv), "kv_heads")
        norm = QKNorm("layernorm") if self.normalize_qk else self.qk_norm
        if self.normalize_qk and self.qk_norm is not None:
            raise ValueError(
                "normalize_qk=True is qk_norm=QKNorm('layernorm'), got both; give one of them"
            )
        if not isinstance(norm, QKNorm | None):
            raise TypeError(
                f"qk_norm must be a QKNorm or None, got {checks.describe(norm)}; give "
                f"QKNorm('rmsnorm'), for example"
            )
        if norm is not None:
            entries["query_ln"] = NormEntry((N, H) if norm.over_heads else (H,), norm)
        if norm is not None and Dk:
            entries["key_ln"] = NormEntry((K, H) if norm.over_heads else (H,), norm)
        if self.gate is not None:
            gate = checks.choice("gate", self.gate, {"head": (N, 1), "feature": (N, Hv)})
            entries["output_gate"] = self.to_heads("output_gate", D, gate)
        return entries | self.out_table(N, Hv, D) | self.score_table(H)

    def to_heads(
        self, name: str, features: int, heads: shapes.Shape, axis: str = "heads"
    ) -> LinearEntry:
        """Return the entry of a projection [D] to heads [N, H]."""
        names = ("embed", axis, "head_dim")
        return LinearEntry((features,), heads, names, has_bias(self.use_bias, name))

    def out_table(self, N: int, Hv: int, D: int) -> Table:
        """Return the table of the output projection from heads [N, Hv]."""
        if not self.project_out:
            return {}
        features, names = (self.out_features or D,), ("heads", "head_dim", "embed")
        biased = has_bias(self.use_bias, "out")
        rows = ("batch", "norm_length")
        return {"out": LinearEntry((N, Hv), features, names, biased, rows, is_out=True)}

    def score_table(self, H: int) -> Table:
        """Return the table of learned sinks and scales of the scores."""
        inits = {"sinks": ZEROS} if self.sinks else {}
        if isinstance(self.scale, str):
            if self.scale != "learned":
                raise ValueError(f"scale must be a number or 'learned', got {self.scale!r}")
            inits["score_scale"] = nn.initializers.constant(H**-0.5)
        shape = (self.num_heads,)
        return {
            name: ArrayEntry(shape, ("heads",), x, is_random=False) for name, x in inits.items()
        }

    def initializers(self, entry: LinearEntry) -> tuple[Initializer, Initializer]:
        """Return the initializers of an entry's kernel and bias."""
        if not entry.is_out:
            return self.kernel_init, self.bias_init
        return self.out_kernel_init or self.kernel_init, self.out_bias_init or self.bias_init


def reading(settings: Settings, tap: Tap, sow_weights: bool) -> Tap:
    """Return the tap of a call, with the reads that a layer's fields and `sow_weights` ask for."""
    module = tap.module
    is_captured = not isinstance(module, nn.Module) or module.is_mutable_collection("intermediates")
    reads, is_custom = capture_of(settings.capture), settings.custom_attention is not None
    if sow_weights and not is_custom:  # A custom function sows them itself.
        names = dict.fromkeys((*(reads.what if reads else ()), "weights"))
        reads = dataclasses.replace(reads or Capture(()), what=tuple(names))
    tap.reads = reads if is_captured or is_custom else None
    if (reads or sow_weights) and not is_captured:
        tap.warn_if_lost()
    tap.sower = module if sow_weights else None
    return tap


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of one call, besides its inputs. `MultiHeadAttention.__call__` describes them.

    Attributes:
      scores: the scores of the layer, with their parameters, then the scores of the call.
      attention: a function in place of `dot_product_attention`. Cached keys are `Stored`.
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
