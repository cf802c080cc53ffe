# Over 300 lines: half of them name arguments, and say what they mean.
"""The nnx layer: its parameters, its cache, and a call of the core."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer, PrecisionLike

from flax_mha import masks
from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import Array
from flax_mha.base.shapes import Shape
from flax_mha.cache import CacheConfig, KVCache, as_cache_config, sources
from flax_mha.cache.sources import Given, Shared
from flax_mha.kernels import Capture, KernelName
from flax_mha.kernels.normalizers import SOFTMAX
from flax_mha.kernels.observe import as_capture
from flax_mha.layer import core, settings
from flax_mha.layer.linear import Linear, answer
from flax_mha.layer.qk_norm import QKNorm, as_qk_norm
from flax_mha.layer.settings import Call, CallOptions, captured
from flax_mha.positions import Rotation
from flax_mha.scores import INIT, ScoreMod, as_scores, learned
from flax_mha.sharding import LogicalNames

_ZEROS = nnx.initializers.zeros_init()
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_NAMES: dict[str, LogicalNames] = {
    "query": ("embed", "heads", "head_dim"),
    "output_gate": ("embed", "heads", "head_dim"),
    "key": ("embed", "kv_heads", "head_dim"),
    "value": ("embed", "kv_heads", "head_dim"),
    "out": ("heads", "head_dim", "embed"),
}


class NnxOptions(CallOptions, total=False):
    """The arguments of a layer's call that do not change what it returns, for type checkers."""

    rngs: nnx.Rngs | nnx.RngStream | None
    decode: bool | None
    is_causal: bool


class Projection(nnx.LinearGeneral):
    """Flax's `nnx.LinearGeneral`, which the layer may compute together with others.

    Attributes:
      names: logical names of the kernel's axes.
    """

    names: LogicalNames

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Map [*B, T, *in] to [*B, T, *features]."""
        if out_sharding is not None:
            return super().__call__(inputs, out_sharding)
        return answer(self, inputs, self._weights)

    # Not public, or `nnx.tabulate` would take it for a call.
    def _weights(self) -> Linear:
        """Return the kernel and the bias, without the product."""
        bias = None if self.bias is None else self.bias[...]
        rows = ("batch", "norm_length" if len(self.axis) == 2 else "length")
        return Linear(
            self.kernel[...], bias, self.names, len(self.axis), rows, self.dtype, self.precision,
            self,
        )  # fmt: skip


class MultiHeadAttention(nnx.Module):
    """Multi-head attention, a drop-in for `flax.nnx.MultiHeadAttention`.

        q = x_q W_q + b_q,   k = x_k W_k + b_k,   v = x_v W_v + b_v
        out = (softmax(q kᵀ / √H, over the keys that the mask allows) v) W_o + b_o

    Parameters, their names and initial values are those of Flax's layer, and so are the names and
    the order of its arguments. With the same numbers as `flax_mha.MultiHeadAttention`: both call
    `flax_mha.core`.

    Args:
      num_heads: N.
      in_features: D, of inputs_q.
      qkv_features: N·H (default: D).
      out_features: D_out (default: D).
      num_kv_heads: K, key/value heads shared by groups of N/K query heads (default: N).
      in_kv_features: D', of inputs_k and inputs_v (default: D); 0 for a layer that is always given
        `kv`, and has no parameters for keys and values.
      dtype: see `flax_mha.MultiHeadAttention`, as all that are not named here.
      decode: keep the keys and values of earlier calls, for which `init_cache` makes room; here or
        in the call (default: False).
      broadcast_dropout: one dropout pattern for all rows of the batch and heads (default: True,
        as in Flax; False in `flax_mha.MultiHeadAttention`).
      rngs: of parameters, and of dropout.
      keep_rngs: whether to keep a stream for dropout; else it is given in the call.
      kernel_metadata: of the parameters of that name, such as `{"out_sharding": (None, "model",
        None)}`; so are all that follow.

    Source: Vaswani et al., "Attention Is All You Need", 2017.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        broadcast_dropout: bool = True,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: PrecisionLike = None,
        kernel_init: Initializer = nnx.nn.linear.default_kernel_init,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = _ZEROS,
        out_bias_init: Initializer | None = None,
        use_bias: bool | Sequence[str] = True,
        attention_fn: Callable[..., Any] | None = None,
        decode: bool | None = None,
        normalize_qk: bool = False,
        cache: CacheConfig | None = None,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        project_out: bool = True,
        kernel: KernelName = "auto",
        mask: masks.Mask | None = None,
        scores: Sequence[ScoreMod] = (),
        scale: float | Literal["learned"] | None = None,
        sinks: bool = False,
        capture: Capture | None = None,
        rotary: Rotation | None = None,
        qk_norm: QKNorm | None = None,
        gate: str | None = None,
        normalizer: str = SOFTMAX,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
        kernel_metadata: Mapping[str, Any] = _NOTHING,
        out_kernel_metadata: Mapping[str, Any] = _NOTHING,
        bias_metadata: Mapping[str, Any] = _NOTHING,
        out_bias_metadata: Mapping[str, Any] = _NOTHING,
        query_ln_scale_metadata: Mapping[str, Any] = _NOTHING,
        key_ln_scale_metadata: Mapping[str, Any] = _NOTHING,
    ) -> None:
        # Over 60 lines: nearly half of them are Flax's names of the arguments, and ours.
        checks.positive(num_heads=num_heads, in_features=in_features)
        checks.optional(out_features=out_features, in_kv_features=in_kv_features or None)
        self.num_heads, self.in_features = num_heads, in_features
        self.out_features = out_features or in_features
        self.in_kv_features = in_features if in_kv_features is None else in_kv_features
        N, K, H, Hv = shapes.head_sizes(
            in_features, num_heads, num_kv_heads, qkv_features, head_dim, v_head_dim
        )
        self.num_kv_heads, self.head_dim, self.v_head_dim = K, H, Hv
        self.qkv_features = N * H
        self.dtype, self.param_dtype, self.precision = dtype, param_dtype, precision
        self.broadcast_dropout, self.dropout_rate = broadcast_dropout, dropout_rate
        self.deterministic, self.decode = deterministic, decode
        self.use_bias, self.normalize_qk = use_bias, normalize_qk
        self.attention_fn, self.force_fp32_for_softmax = attention_fn, False
        self.kernel, self.rotary, self.scale = kernel, rotary, scale
        self.qk_norm, self.normalizer = qk_norm, normalizer
        self.cache, self.capture = as_cache_config(cache), as_capture(capture)
        # Their arrays are part of the layer's state.
        self.mask, self.scores = nnx.data(mask), nnx.data(as_scores(scores))
        self._check()

        same = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}

        def heads(name: str, features: int, to: Shape) -> Projection | None:
            if not features or not to:
                return nnx.data(None)
            return self._projection(
                name, features, to, kernel_init=kernel_init, bias_init=bias_init,
                kernel_metadata=kernel_metadata, bias_metadata=bias_metadata, **same,
            )  # fmt: skip

        self.query = heads("query", in_features, (N, H))
        self.key = heads("key", self.in_kv_features, (K, H))
        self.value = heads("value", self.in_kv_features, (K, Hv))
        norm = as_qk_norm(qk_norm, normalize_qk)
        self.query_ln = self.key_ln = nnx.data(None)
        if norm is not None:
            self.query_ln = norm.module(nnx, H, scale_metadata=query_ln_scale_metadata, **same)
        if norm is not None and self.in_kv_features:
            self.key_ln = norm.module(nnx, H, scale_metadata=key_ln_scale_metadata, **same)
        self.output_gate = heads("output_gate", in_features, settings.gate_features(gate, N, Hv))
        self.out = nnx.data(None)
        if project_out:
            self.out = self._projection(
                "out", (N, Hv), self.out_features, axis=(-2, -1),
                kernel_init=out_kernel_init or kernel_init, bias_init=out_bias_init or bias_init,
                kernel_metadata=out_kernel_metadata or kernel_metadata,
                bias_metadata=out_bias_metadata or bias_metadata, **same,
            )  # fmt: skip

        def make(name: str, shape: Shape, _: Any, init: Initializer = INIT, /) -> jax.Array:
            setattr(self, name, nnx.Param(init(rngs.params(), shape, param_dtype)))
            return getattr(self, name).get_value()

        learned(self.scores, N, H, make)
        zeros = nnx.Param(jnp.zeros(N, param_dtype)) if sinks else None
        self.sinks: nnx.Param | None = nnx.data(zeros)
        scales = (
            nnx.Param(jnp.full(N, H**-0.5, param_dtype)) if settings.learns_scale(scale) else None
        )
        self.score_scale: nnx.Param | None = nnx.data(scales)
        self.rngs = rngs.dropout.fork() if keep_rngs and dropout_rate > 0 else None
        self.kv: nnx.Cache | None = nnx.data(None)

    def _projection(self, name: str, *args: Any, **kwargs: Any) -> Projection:
        biased = settings.has_bias(self.use_bias, name)
        made = Projection(*args, use_bias=biased, precision=self.precision, **kwargs)
        made.names = _NAMES[name]
        return made

    def _check(self) -> None:
        """The settings that say by name or type what they must be."""
        checks.rate("dropout_rate", self.dropout_rate)
        for name in ("broadcast_dropout", "normalize_qk"):
            checks.flag(name, getattr(self, name))
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) is not None:
                checks.dtype(name, getattr(self, name), "a floating dtype")
        if self.precision is not None:
            checks.precision("precision", self.precision)
        core.Settings.of(self, ())
        self.cache.window(self.mask)

    @overload
    def __call__(
        self, inputs_q: jax.Array, inputs_k: jax.Array | None = ...,
        inputs_v: jax.Array | None = ...,
        *, return_weights: Literal[False] = ..., return_kv: Literal[False] = ...,
        **options: Unpack[NnxOptions],
    ) -> jax.Array: ...  # fmt: skip
    @overload
    def __call__(
        self, inputs_q: jax.Array, inputs_k: jax.Array | None = ...,
        inputs_v: jax.Array | None = ...,
        *, return_weights: Literal[True], return_kv: Literal[False] = ...,
        **options: Unpack[NnxOptions],
    ) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip
    @overload
    def __call__(
        self, inputs_q: jax.Array, inputs_k: jax.Array | None = ...,
        inputs_v: jax.Array | None = ...,
        *, return_weights: Literal[False] = ..., return_kv: Literal[True],
        **options: Unpack[NnxOptions],
    ) -> tuple[jax.Array, Shared]: ...  # fmt: skip
    @overload
    def __call__(
        self, inputs_q: jax.Array, inputs_k: jax.Array | None = ...,
        inputs_v: jax.Array | None = ...,
        *, return_weights: bool = ..., return_kv: bool = ...,
        **options: Unpack[NnxOptions],
    ) -> Any: ...  # fmt: skip
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: masks.MaskLike | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        bias: jax.Array | None = None,
        scores: Sequence[ScoreMod] = (),
        positions: jax.Array | tuple[jax.Array, jax.Array] | None = None,
        head_mask: jax.Array | None = None,
        lengths: jax.Array | None = None,
        order: Array | None = None,
        kv: Given | None = None,
        return_weights: bool = False,
        return_kv: bool = False,
    ) -> Any:
        """Attends from inputs_q to inputs_k and inputs_v.

        Args:
          inputs_q: [*B, T, D].
          inputs_k: [*B, S, D'] (default: inputs_q, self-attention).
          inputs_v: [*B, S, D'] (default: inputs_k).
          mask: see `flax_mha.MultiHeadAttention`, as all that are not named here.
          deterministic: if True, no dropout; here or in the constructor, or by `eval()`.
          rngs: of dropout (default: the layer's own).
          sow_weights: sow the weights [*B, N, T, S] as `attention_weights`, of `nnx.Intermediate`.
          decode: append these tokens to the cache and attend to all so far, causally; any number of
            them (default: the layer's `decode`).
          is_causal: see no later key; in decoding that is so anyhow.
          bias: see there.
          scores: see there.
          positions: see there.
          head_mask: see there.
          lengths: see there.
          order: see there.
          kv: see there.
          return_weights: see there.
          return_kv: see there.

        Returns:
          out [*B, T, D_out], or a tuple of it, the weights and the keys and values, as asked for.

        Raises:
          ValueError: if sizes do not fit, or there is no cache to decode with.
          TypeError: if a dtype is not supported.
        """
        for name, flag in (("sow_weights", sow_weights), ("is_causal", is_causal)):
            checks.flag(name, flag)
        cache: core.Held = None
        if kv is not None:
            cache = sources.as_shared(kv, inputs_k, inputs_v)
            shapes.check_inputs(inputs_q, inputs_q, inputs_q)
        else:
            inputs_k, inputs_v = shapes.resolve_inputs(inputs_q, inputs_k, inputs_v)
            if self.decode if decode is None else decode:
                cache = self._cache()
        self._check_features(inputs_q, inputs_k, inputs_v)
        if is_causal:
            mask = masks.combine(masks.Causal(), mask)
        # Outside of `nnx.capture`, of which nnx has no public sign, it would stay in the layer.
        listened = hasattr(self, "__captures__")
        call = Call(
            mask, bias, scores, positions, head_mask, lengths, order,
            dropout_rng=self._dropout_rng(deterministic, rngs), return_weights=return_weights,
            capture=captured(self.capture, sow_weights, listened, self.attention_fn),
            sower=self if sow_weights else None,
        )  # fmt: skip
        weights, settings = self._weights(), self._settings()
        found = core.attention(weights, settings, inputs_q, inputs_k, inputs_v, call, cache)
        if found.cache is not None and self.kv is not None:
            self.kv.set_value(found.cache)
        for name, x in found.captured.items():
            self.sow(nnx.Intermediate, f"attention_{name}", x)
        return core.returned(found, return_weights, return_kv)

    def init_cache(self, input_shape: Shape, dtype: Dtype | None = None) -> None:
        """Makes room for the tokens of inputs of that shape, [*B, S, D]; or empties the cache.

        A layer without keys of its own (`in_kv_features=0`) needs none.

        Args:
          input_shape: see above.
          dtype: of what is kept, floating point or int8 (default: that of `cache`, or float32).
        """
        *B, S, _ = checks.sizes("input_shape", input_shape)
        if self.key is None:
            return
        empty = KVCache.empty(
            tuple(B), self.cache.slots or S, self.num_kv_heads, self.head_dim, self.v_head_dim,
            dtype=dtype or self.cache.dtype or jnp.float32, window=self.cache.window(self.mask),
        )  # fmt: skip
        self.kv = nnx.Cache(empty)

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | Shape | None = None,
        max_length: int | None = None,
    ) -> None:
        """What `nnx.view` sets; with decode=True and both sizes it makes room for tokens."""
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
        if decode and self.kv is None and batch_size is not None and max_length is not None:
            batch = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
            self.init_cache((*batch, max_length, self.in_features), self.cache.dtype or self.dtype)

    def _cache(self) -> KVCache:
        if self.kv is None:
            raise ValueError(
                "decode=True needs a cache, and there is none; call init_cache(x.shape) of inputs "
                "[*B, S, D] as long as all tokens together"
            )
        return self.kv.get_value()

    def _check_features(self, *given: Any) -> None:
        if not self.in_kv_features and given[1] is not None:
            raise ValueError(
                "a layer of in_kv_features=0 has no keys and values of its own; give kv= in the "
                "call, or leave in_kv_features out"
            )
        wanted = (self.in_features, self.in_kv_features, self.in_kv_features)
        for name, x, features in zip(
            ("inputs_q", "inputs_k", "inputs_v"), given, wanted, strict=True
        ):
            if x is not None and x.shape[-1] != features:
                raise ValueError(
                    f"{name} must have {features} features, as the layer was made for, got "
                    f"{x.shape}; change in_features or in_kv_features"
                )

    def _settings(self) -> core.Settings:
        scores = learned(
            self.scores,
            self.num_heads,
            self.head_dim,
            lambda name, *_: getattr(self, name).get_value(),
        )
        return core.Settings.of(self, scores)

    def _weights(self) -> core.Weights:
        def linear(name: str) -> Any:
            module = getattr(self, name)
            if isinstance(module, Projection):
                return module._weights()
            # One that somebody else has put there is called.
            return None if module is None else Linear(None, None, _NAMES[name], module=module)

        def value(param: Any) -> jax.Array | None:
            return None if param is None else param.get_value()

        return core.Weights(
            linear("query"), linear("key"), linear("value"), linear("out"),
            self.query_ln, self.key_ln, value(self.sinks),
            linear("output_gate"), value(self.score_scale),
        )  # fmt: skip

    def _dropout_rng(self, deterministic: bool | None, rngs: Any) -> jax.Array | None:
        """A key, if there is to be dropout."""
        if self.dropout_rate == 0:
            return None
        deterministic = self.deterministic if deterministic is None else deterministic
        if deterministic is None:
            raise ValueError(
                f"dropout_rate={self.dropout_rate} needs to know whether to drop, got "
                f"deterministic=None; give it here or in the constructor, or call train() or eval()"
            )
        if checks.flag("deterministic", deterministic):
            return None
        stream = self.rngs if rngs is None else rngs
        stream = stream.dropout if isinstance(stream, nnx.Rngs) else stream
        if stream is None:
            raise ValueError(
                "dropout needs rngs, and the layer has kept none; give rngs= in the call, or "
                "keep_rngs=True"
            )
        return stream()

    @property
    def cached_key(self) -> jax.Array | None:
        """The keys that the cache holds, as Flax's layer has them: [*B, S, K, H]."""
        return None if self.kv is None else jnp.swapaxes(self.kv.get_value().key, -3, -2)

    @property
    def cached_value(self) -> jax.Array | None:
        """The values that the cache holds, [*B, S, K, Hv]."""
        return None if self.kv is None else jnp.swapaxes(self.kv.get_value().value, -3, -2)

    @property
    def cache_index(self) -> jax.Array | None:
        """How many tokens each row of the cache has, int32 [*B]."""
        return None if self.kv is None else self.kv.get_value().length
