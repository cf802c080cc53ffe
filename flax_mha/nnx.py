"""The layers of `flax_mha` for nnx."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import FrozenDict
from flax.nnx.module import first_from
from flax.typing import Dtype, Initializer, PrecisionLike

from flax_mha import linen, masks, variants
from flax_mha.base import shapes
from flax_mha.base.arguments import check_given, check_refused
from flax_mha.base.coordinates import Array
from flax_mha.base.shapes import Shape
from flax_mha.cache import CacheConfig, KeyValues, KVCache, collection, resolve
from flax_mha.cache.resolve import KVLike
from flax_mha.kernels import Capture
from flax_mha.kernels.call.normalizers import SOFTMAX
from flax_mha.layer import core
from flax_mha.layer.linear import Linear, default_kernel_init
from flax_mha.layer.parameters import ArrayEntry, LinearEntry, NormEntry
from flax_mha.layer.qk_norm import QKNorm
from flax_mha.layer.settings import ZEROS, Call, reading
from flax_mha.positions import Rotation
from flax_mha.scores import INIT, ScoreMod, as_scores, learned
from flax_mha.signatures.attention_fn import attention_fn
from flax_mha.taps.tap import Tap

__all__ = [
    "ChosenBlocksAttention", "DifferentialAttention", "ForgettingAttention",
    "MultiHeadAttention", "MultiHeadLatentAttention", "Projection", "TalkingHeadsAttention",
]  # fmt: skip
__dir__ = __all__.copy

Metadata: TypeAlias = Mapping[str, Any]
_NOTHING: Metadata = FrozenDict()
# The fields that a layer has as attributes, because they may change.
_CHANGING = ("mask", "scores", "kernel", "dropout_rate", "deterministic", "decode", "capture")
_INITIALIZERS = ("kernel_init", "out_kernel_init", "bias_init", "out_bias_init")


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _as_variables(tree: Any) -> Any:
    """Return a tree as an attribute of a layer, with a variable for each array."""
    kinds = jax.Array | np.ndarray
    return nnx.data(jax.tree.map(lambda x: nnx.Variable(x) if isinstance(x, kinds) else x, tree))


class Projection(nnx.LinearGeneral):
    """Flax's `nnx.LinearGeneral`, on any mesh."""

    entry: LinearEntry

    def __call__(self, inputs: jax.Array) -> jax.Array:  # type: ignore[override]
        """Map [*B, T, *in] to [*B, T, *features]."""
        return self._weights().product(inputs)

    # Private, or `nnx.tabulate` would take it for a call.
    def _weights(self) -> Linear:
        """Return the kernel and the bias, without the product."""
        bias = None if self.bias is None else self.bias[...]
        return Linear(
            self.kernel[...], bias, self.entry.names, len(self.axis), self.entry.rows, self.dtype,
            self.precision, self,
        )  # fmt: skip


def _field(name: str) -> Any:
    """Return a property that reads a field of a layer's config, and can't be set."""
    return property(lambda layer: getattr(layer.config, name))


class MultiHeadAttention(nnx.Module):
    """`flax_mha.MultiHeadAttention` in nnx, a drop-in for `flax.nnx.MultiHeadAttention`.

    Parameter names, shapes and float32 initial values match Flax's layer, and so do its arguments
    and their order. `config` is a linen layer with the same fields. You can set `deterministic`,
    `decode`, `dropout_rate`, `rngs`, `mask`, `kernel`, `capture`, and the cache `kv`.

    Args:
      in_features: the features of inputs_q, D.
      in_kv_features: the features of inputs_k and inputs_v, D' (default: D). With 0 every call
        needs `kv`.
      rngs: the streams of keys for parameters and dropout.
      keep_rngs: True to keep a stream for dropout; otherwise give one in the call.
      kernel_metadata: of the projections' kernels, such as {"out_sharding": (None, "model", None)}.
      out_kernel_metadata: of the output projection's kernel (default: kernel_metadata).
      bias_metadata: of the biases.
      out_bias_metadata: of the output projection's bias (default: bias_metadata).
      query_ln_scale_metadata: of the scale of the queries' norm.
      key_ln_scale_metadata: of the scale of the keys' norm.
      **fields: the fields that only a variant has.

    `flax_mha.MultiHeadAttention` describes the other arguments. With `decode`, call `init_cache`
    first.
    """

    # The linen layer of the same kind. An instance that is bound to nothing is the config.
    kind: ClassVar[type[linen.MultiHeadAttention]] = linen.MultiHeadDotProductAttention

    # What a layer may lack.
    rngs: Any = None
    edits: Any = None
    scores: Any = ()

    def __init__(
        self, num_heads: int, in_features: int, qkv_features: int | None = None,
        out_features: int | None = None, num_kv_heads: int | None = None,
        in_kv_features: int | None = None, *, rngs: nnx.Rngs, head_dim: int | None = None,
        v_head_dim: int | None = None, mask: masks.MaskLike | None = None,
        rotary: Rotation | None = None, scores: Sequence[ScoreMod] = (),
        scale: float | Literal["learned"] | None = None, sinks: bool = False,
        normalizer: str = SOFTMAX, kernel: str = "auto", dropout_rate: float = 0.0,
        broadcast_dropout: bool = True, deterministic: bool | None = None,
        decode: bool | None = False, cache: CacheConfig | None = None,
        capture: Capture | None = None, qk_norm: QKNorm | None = None, gate: str | None = None,
        exclusive: bool = False, use_bias: bool | Sequence[str] = True, project_out: bool = True,
        dtype: Dtype | None = None, param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None, kernel_init: Initializer = default_kernel_init,
        out_kernel_init: Initializer | None = None, bias_init: Initializer = ZEROS,
        out_bias_init: Initializer | None = None, normalize_qk: bool = False,
        attention_fn: Callable[..., Any] | None = attention_fn,
        force_fp32_for_softmax: bool = False, keep_rngs: bool = True,
        kernel_metadata: Metadata = _NOTHING, out_kernel_metadata: Metadata = _NOTHING,
        bias_metadata: Metadata = _NOTHING, out_bias_metadata: Metadata = _NOTHING,
        query_ln_scale_metadata: Metadata = _NOTHING, key_ln_scale_metadata: Metadata = _NOTHING,
        **fields: Any,
    ) -> None:  # fmt: skip
        check_given(type(self).__name__, fields)
        config: Any = self.kind(
            num_heads, parent=None, qkv_features=qkv_features, out_features=out_features,
            num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim, mask=mask,
            rotary=rotary, scores=scores, scale=scale, sinks=sinks, normalizer=normalizer,
            kernel=kernel, dropout_rate=dropout_rate, broadcast_dropout=broadcast_dropout,
            deterministic=deterministic, decode=decode, cache=cache or CacheConfig(),
            capture=capture, qk_norm=qk_norm, gate=gate, exclusive=exclusive, use_bias=use_bias,
            project_out=project_out, dtype=dtype, param_dtype=param_dtype, precision=precision,
            kernel_init=kernel_init, out_kernel_init=out_kernel_init, bias_init=bias_init,
            out_bias_init=out_bias_init, normalize_qk=normalize_qk, attention_fn=attention_fn,
            force_fp32_for_softmax=force_fp32_for_softmax, **fields,
        )  # fmt: skip
        config.check_fields()
        config.cache.window(mask)  # A call may decode.
        D, Dk = in_features, in_kv_features
        self.in_features, self.in_kv_features = D, D if Dk is None else Dk
        N, K, H, Hv = config.sizes(D)
        # Two functions are never equal, and few can be pickled, so initializers are not kept.
        self.config = dataclasses.replace(
            config, **dict.fromkeys((*_CHANGING, *_INITIALIZERS)), qkv_features=N * H,
            out_features=out_features or D, num_kv_heads=K, head_dim=H, v_head_dim=Hv,
        )  # fmt: skip
        scores = as_scores(scores)
        self.mask = _as_variables(mask)
        if scores:
            self.scores = _as_variables(scores)
        self.kernel, self.dropout_rate, self.capture = kernel, dropout_rate, capture
        self.deterministic, self.decode = deterministic, decode
        self.kv: Any = nnx.data(None)
        metadata = {"query_ln": query_ln_scale_metadata, "key_ln": key_ln_scale_metadata}
        outs = (out_kernel_metadata or kernel_metadata, out_bias_metadata or bias_metadata)
        table = config.table(D, self.in_kv_features, self.in_kv_features)
        for name, entry in table.items():
            if isinstance(entry, LinearEntry):
                of_kernel, of_bias = outs if entry.is_out else (kernel_metadata, bias_metadata)
                inits = [functools.partial(shapes.draw, x) for x in config.initializers(entry)]
                projection = Projection(
                    entry.inputs, entry.features, axis=tuple(range(-len(entry.inputs), 0)),
                    use_bias=entry.has_bias, dtype=dtype, param_dtype=param_dtype,
                    precision=precision, kernel_init=inits[0], bias_init=inits[1], rngs=rngs,
                    kernel_metadata=of_kernel, bias_metadata=of_bias,
                )  # fmt: skip
                projection.entry = entry
                setattr(self, name, projection)
            elif isinstance(entry, NormEntry):
                # Flax makes a flat scale by default, but linen's has all axes.
                setattr(self, name, entry.norm.module(
                    nnx, math.prod(entry.shape), dtype=dtype, param_dtype=param_dtype, rngs=rngs,
                    scale_metadata=metadata.get(name, _NOTHING),
                    scale_init=lambda _, __, dtype, entry=entry: jnp.ones(entry.shape, dtype),
                ))  # fmt: skip

        def make(
            name: str, shape: Shape, _: Any, init: Initializer = INIT, is_random: bool = True, /
        ) -> jax.Array:
            key: Any = rngs.params() if is_random else None
            setattr(self, name, nnx.Param(shapes.draw(init, key, shape, param_dtype)))
            return getattr(self, name).get_value()

        learned(scores, config.score_heads, H, make)
        # Arrays come after those of the scores, as in linen.
        for name, entry in table.items():
            if isinstance(entry, ArrayEntry):
                make(name, entry.shape, entry.names, entry.init, entry.is_random)
        if keep_rngs and dropout_rate > 0:
            self.rngs = rngs.dropout.fork()

    num_heads = _field("num_heads")
    qkv_features = _field("qkv_features")
    out_features = _field("out_features")
    num_kv_heads = _field("num_kv_heads")
    head_dim = _field("head_dim")
    dtype = _field("dtype")
    attention_fn = _field("attention_fn")

    @property
    def settings(self) -> linen.MultiHeadAttention:
        """All fields, as the next call reads them."""
        changing = nnx.as_pure({name: getattr(self, name) for name in _CHANGING})
        return dataclasses.replace(self.config, **changing)

    def __call__(  # noqa: D417
        self, inputs_q: jax.Array, inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None, *, mask: masks.MaskLike | None = None,
        bias: jax.Array | None = None, scores: Sequence[ScoreMod] = (),
        positions: jax.Array | tuple[jax.Array | None, jax.Array | None] | None = None,
        head_mask: jax.Array | None = None, lengths: jax.Array | None = None,
        order: Array | None = None, kv: KVLike | None = None, deterministic: bool | None = None,
        sow_weights: bool = False, rngs: nnx.Rngs | nnx.RngStream | None = None,
        decode: bool | None = None, is_causal: bool = False,
        input_positions: jax.Array | None = None, return_weights: bool = False,
        return_kv: bool = False, **refused: Any,
    ) -> Any:  # fmt: skip
        """Attend from inputs_q to inputs_k and inputs_v.

        `flax_mha.MultiHeadAttention.__call__` describes the other arguments.

        Args:
          inputs_q: the inputs of the queries [*B, T, D].
          rngs: the streams of keys for dropout (default: the layer's).
          sow_weights: True to sow the weights [*B, N, T, S] as `attention_weights`, an
            `nnx.Intermediate`. Read them with `nnx.capture`, or with `nnx.pop` after the call.
          decode: True to append these tokens to the cache that `init_cache` made, and to attend
            causally to all tokens so far (default: the layer's `decode`).
          is_causal: True to hide later keys. Decoding always does.
          input_positions: Flax's name for `positions`.
        """
        check_refused(self, refused)
        if input_positions is not None:
            if positions is not None:
                raise ValueError(
                    "input_positions is Flax's name of positions, got both; give only positions"
                )
            positions = input_positions
        settings = self.settings
        decode = self.decode if decode is None else decode
        inputs_k, inputs_v, cache = resolve.resolve_call(
            kv, inputs_q, inputs_k, inputs_v, settings.cache if decode else None,
            nnx.as_pure(self.kv) if decode else None,
        )  # fmt: skip
        if isinstance(cache, CacheConfig):
            raise ValueError(
                "decode=True needs a cache, and there is none; call init_cache(x.shape) of inputs "
                "[*B, S, D] as long as all tokens together"
            )
        if not self.in_kv_features and not isinstance(cache, KeyValues):
            raise ValueError(
                "a layer of in_kv_features=0 has no keys and values of its own; give kv= in the "
                "call, or leave in_kv_features out"
            )
        if is_causal:
            mask = masks.combine(masks.Causal(), mask)

        def read(name: str, *_: Any) -> Any:
            return getattr(self, name).get_value()

        own = learned(settings.scores, settings.score_heads, self.head_dim, read)
        tap = Tap(self, nnx.as_pure(self.edits) or {})
        call = Call(
            mask, bias, own + as_scores(scores), positions, head_mask, lengths, order,
            dropout_rng=self._dropout_rng(deterministic, rngs), return_weights=return_weights,
            tap=reading(settings, tap, sow_weights),
        )  # fmt: skip
        output = settings.compute(self._parameters(), inputs_q, inputs_k, inputs_v, call, cache)
        if output.cache is not None:
            self._keep(output.cache)
        return core.returned(output, return_weights, return_kv)

    def init_cache(self, input_shape: Shape, dtype: Dtype | None = None) -> None:
        """Make an empty cache with room for the tokens of inputs.

        A layer without parameters for keys (`in_kv_features=0`) needs none.

        Args:
          input_shape: the shape of all inputs together, [*B, S, D].
          dtype: the dtype of the cache (default: from the field `cache`, or float32).
        """
        if not self.in_kv_features:
            return
        config = self.config.cache
        config = dataclasses.replace(config, dtype=dtype or config.dtype or jnp.float32)

        # The computation makes the cache it needs, which is all zeros.
        compute = functools.partial(self.settings.compute, self._parameters())
        x = jax.ShapeDtypeStruct(input_shape, self.config.param_dtype)
        output = jax.eval_shape(lambda x: compute(x, None, None, Call(), config), x)
        self._keep(collection.constrain_cache(jax.tree.map(jnp.zeros_like, output.cache)))

    def set_view(
        self, deterministic: bool | None = None, decode: bool | None = None,
        batch_size: int | Shape | None = None, max_length: int | None = None,
    ) -> None:  # fmt: skip
        """Set the attributes of an `nnx.view`. With `decode` and both sizes, also make a cache.

        Args:
          deterministic: True for no dropout.
          decode: True to decode.
          batch_size: the size of the batch, or a tuple of sizes.
          max_length: the number of tokens.
        """
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
        if decode and self.kv is None and batch_size is not None and max_length is not None:
            batch = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
            dtype = self.config.cache.dtype or self.dtype
            self.init_cache((*batch, max_length, self.in_features), dtype)

    def _keep(self, cache: KVCache) -> None:
        """Keep a cache for the next call, in the same variables if shapes and dtypes stay."""

        def form(x: Any) -> Any:
            return jax.tree.map(lambda x: (x.shape, x.dtype), x, is_leaf=_is_variable)

        if _is_variable(getattr(self.kv, "key", None)) and form(self.kv) == form(cache):
            jax.tree.map(lambda held, x: held.set_value(x), self.kv, cache, is_leaf=_is_variable)
        else:
            # `cache.truncate` of a state reads the window.
            self.kv = nnx.data(jax.tree.map(lambda x: nnx.Cache(x, window=cache.window), cache))

    def _parameters(self) -> dict[str, Any]:
        """Return the parameters by name, as `compute` reads them."""

        def read(x: Any) -> Any:
            if _is_variable(x):
                return x.get_value()
            # A norm is called, and so is a module that a user has put there.
            return x._weights() if isinstance(x, Projection) else x

        Dk = self.in_kv_features
        table = self.config.table(self.in_features, Dk, Dk)
        return {name: read(getattr(self, name)) for name in table}

    def _dropout_rng(
        self, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None
    ) -> jax.Array | None:
        """Return a key for dropout, or None for no dropout."""
        if self.dropout_rate == 0:
            return None
        deterministic = first_from(
            deterministic, self.deterministic,
            error_msg=f"dropout_rate={self.dropout_rate} needs to know whether to drop, got "
            f"deterministic=None; give it here or in the constructor, or call train() or eval()",
        )  # fmt: skip
        if deterministic:
            return None
        stream = first_from(
            rngs, self.rngs, error_msg="dropout needs rngs; give it in the call, or keep_rngs=True"
        )
        return stream.dropout() if isinstance(stream, nnx.Rngs) else stream()

    def _cached(self, name: str) -> jax.Array | None:
        """Return an array of the cache in the order of Flax's axes."""
        kept = nnx.as_pure(self.kv)
        return None if kept is None else jnp.swapaxes(getattr(kept, name), -3, -2)

    @property
    def cached_key(self) -> jax.Array | None:
        """The keys in the cache, as Flax's layer has them: [*B, S, K, H]."""
        return self._cached("key")

    @property
    def cached_value(self) -> jax.Array | None:
        """The values in the cache, [*B, S, K, Hv]."""
        return self._cached("value")

    @property
    def cache_index(self) -> jax.Array | None:
        """The number of tokens in the cache of each example, int32 [*B]."""
        return None if self.kv is None else nnx.as_pure(self.kv.length)

    @cache_index.setter
    def cache_index(self, _: Any) -> None:
        raise ValueError(
            "a cache of Flax's layer can't be read, got cache_index; pass nnx.state(layer, "
            "nnx.Param), and decode the prompt again"
        )


# Only the layer that replaces Flax's has its default, True.
_variant_init: Any = functools.partialmethod(MultiHeadAttention.__init__, broadcast_dropout=False)


class MultiHeadLatentAttention(MultiHeadAttention):
    """`flax_mha.variants.MultiHeadLatentAttention` in nnx."""

    kind = variants.MultiHeadLatentAttention
    __init__ = _variant_init


class DifferentialAttention(MultiHeadAttention):
    """`flax_mha.variants.DifferentialAttention` in nnx."""

    kind = variants.DifferentialAttention
    __init__ = _variant_init


class ForgettingAttention(MultiHeadAttention):
    """`flax_mha.variants.ForgettingAttention` in nnx."""

    kind = variants.ForgettingAttention
    __init__ = _variant_init


class TalkingHeadsAttention(MultiHeadAttention):
    """`flax_mha.variants.TalkingHeadsAttention` in nnx."""

    kind = variants.TalkingHeadsAttention
    __init__ = _variant_init


class ChosenBlocksAttention(MultiHeadAttention):
    """`flax_mha.variants.ChosenBlocksAttention` in nnx."""

    kind = variants.ChosenBlocksAttention
    __init__ = _variant_init
