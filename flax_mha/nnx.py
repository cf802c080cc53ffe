"""The nnx layers: they make parameters, hold caches, and call the functions of `layer`."""

import dataclasses
import functools
import math
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import FrozenDict
from flax.typing import Dtype, Initializer

from flax_mha import linen, masks
from flax_mha.base import checks, shapes
from flax_mha.base.arguments import check_refused, described_as, hidden_field
from flax_mha.base.coordinates import Array
from flax_mha.base.shapes import Shape
from flax_mha.cache import CacheConfig, as_cache_config, collection, resolve
from flax_mha.cache.resolve import Given
from flax_mha.edits import Edit, Edits
from flax_mha.layer import core
from flax_mha.layer.linear import Linear
from flax_mha.layer.parameters import ArrayEntry, Entry, LinearEntry, NormEntry
from flax_mha.layer.settings import ZEROS, Call, CallOptions
from flax_mha.layer.standard import Attention
from flax_mha.scores import INIT, ScoreMod, as_scores, learned
from flax_mha.taps.tap import Tap
from flax_mha.variants.chosen_blocks import ChosenBlocks
from flax_mha.variants.differential import Differential
from flax_mha.variants.forgetting import Forgetting
from flax_mha.variants.latent import Latent
from flax_mha.variants.talking_heads import TalkingHeads

__all__ = [
    "ChosenBlocksAttention", "DifferentialAttention", "ForgettingAttention", "Module",
    "MultiHeadAttention", "MultiHeadLatentAttention", "NnxOptions", "Projection",
    "TalkingHeadsAttention",
]  # fmt: skip
__dir__ = __all__.copy

_NOTHING: Mapping[str, Any] = FrozenDict()
# Parameters that a layer may lack.
_MAYBE = ("key", "value", "query_ln", "key_ln", "output_gate", "out", "sinks", "score_scale")
# Attributes that are trees, and the variables that hold their arrays.
_TREES: dict[str, Any] = {
    "mask": nnx.Variable, "scores": nnx.Variable, "edits": Edits, "kv": nnx.Cache
}  # fmt: skip


class NnxOptions(CallOptions, total=False):
    """The arguments of an nnx layer's call, beside the inputs and `return_…`."""

    rngs: nnx.Rngs | nnx.RngStream | None
    decode: bool | None
    is_causal: bool
    input_positions: jax.Array | None


class _Tabulated(nnx.Module):
    """A module whose class `nnx.tabulate` leaves as it was."""

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute."""
            if name == "_nnx_tabulate_id":
                # `nnx.tabulate` replaces methods of this copy's class, and leaves them if it fails.
                # As a property, `compute` is no call of a module, and has no row.
                cls = type(self)
                hidden = property(lambda self: functools.partial(cls.compute, self))
                own = type(cls)(cls.__name__, (cls,), {"compute": hidden})
                object.__setattr__(self, "__class__", own)
            super().__setattr__(name, value)


class Module(_Tabulated):
    """A module with a variable for each array of its trees, which nnx updates by its path."""

    if not TYPE_CHECKING:

        def __getattribute__(self, name: str) -> Any:
            """Return an attribute, and of a tree of variables the values."""
            value = object.__getattribute__(self, name)
            if name not in _TREES:
                return value
            if name == "kv" and value is not None:
                # Read and replaced like the value of a variable.
                return types.SimpleNamespace(
                    get_value=lambda: collection.restore(nnx.as_pure(value)),
                    set_value=lambda new: setattr(self, name, new),
                )
            return nnx.as_pure(value)

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute. A field's default stays in the class until the field changes."""
            values, fields = vars(self), getattr(self, "__dataclass_fields__", {})
            if name in fields and name not in values and hasattr(type(self), name):
                default = getattr(type(self), name)
                # A function would be read from the class as a method.
                is_equal = value is default and not hasattr(value, "__get__")
                if type(value) is type(default) and isinstance(value, int | float | str):
                    is_equal = value == default
                if is_equal:
                    return  # nnx checks each value that it stores, and reads it in each call.
                # nnx refuses an array only for an attribute that is there. Of `__init__`, the
                # layer's own check refuses it, before `edits` is set.
                if "edits" in values:
                    values[name] = default
            held = values.get(name)
            try:
                super().__setattr__(name, value)
            except ValueError:  # A parameter or a module, where the field holds none.
                if name in fields:
                    raise hidden_field(type(self), name) from None
                raise
            if name in _TREES:
                tree, values[name] = values[name], held
                values[name] = None if tree is None else _hold(self, name, tree, held)


def _hold(layer: Any, name: str, tree: Any, held: Any) -> Any:
    """Return a tree with a variable for each array, `held` itself for a cache of the same form."""
    kind, static = _TREES[name], {}
    if name == "kv":
        tree = tree.get_value() if hasattr(tree, "get_value") else tree
        tree = collection.restore(tree, as_cache_config(layer.cache).window(layer.mask))
        is_held = len({jax.tree.structure(x, _is_field) for x in (held, tree)}) == 1
        if is_held and all(jax.tree.leaves(jax.tree.map(_fits, held, tree, is_leaf=_is_field))):
            # Call each variable's own method, as `nnx.var_defaults` may have changed its class.
            jax.tree.map(lambda old, new: old.set_value(new), held, tree, is_leaf=_is_field)
            return held
        # For `flax_mha.cache.truncate` of a state.
        static = {"window": tree.window} if getattr(tree, "window", None) is not None else {}

    def variable(x: Any) -> Any:
        # Each field of a cache is one: their names tell a `KVCache` from a `Memory`.
        is_array = isinstance(x, jax.Array | np.ndarray) or (x is None and name == "kv")
        # A reference cannot hold None.
        form = {"ref": False} if x is None else {}
        return kind(x, **static, **form) if is_array else x

    return jax.tree.map(variable, tree, is_leaf=_is_field)


def _fits(variable: Any, x: Any) -> bool:
    """Return True if a variable can hold x: a reference keeps its shape and dtype."""
    held = variable.get_value()
    if not variable.ref or held is None or x is None:
        return not variable.ref
    return (held.shape, held.dtype) == (x.shape, x.dtype)


def _is_field(x: Any) -> bool:
    return x is None or isinstance(x, nnx.Variable)


class Projection(_Tabulated, nnx.LinearGeneral):
    """Flax's `nnx.LinearGeneral`, on any mesh.

    Attributes:
      entry: the sizes and the logical names of its axes.
    """

    entry: LinearEntry

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Map [*B, T, *in] to [*B, T, *features]."""
        if out_sharding is not None:
            return super().__call__(inputs, out_sharding)
        return self._weights().product(inputs)

    # Not public, or `nnx.tabulate` would take it for a call.
    def _weights(self) -> Linear:
        """Return the kernel and the bias, without the product."""
        bias = None if self.bias is None else self.bias[...]
        return Linear(
            self.kernel[...], bias, self.entry.names, len(self.axis), self.entry.rows, self.dtype,
            self.precision, self,
        )  # fmt: skip


@dataclasses.dataclass(eq=False, repr=False)
class _Sizes:
    """The fields that may be given by position."""

    num_heads: int
    in_features: int
    qkv_features: int | None = None
    out_features: int | None = None
    num_kv_heads: int | None = None
    in_kv_features: int | None = None


@described_as(linen.MultiHeadAttention)
@dataclasses.dataclass(eq=False, repr=False)
class MultiHeadAttention(Attention, _Sizes, Module):
    """Multi-head attention, a drop-in for `flax.nnx.MultiHeadAttention`.

        q = x_q W_q + b_q,   k = x_k W_k + b_k,   v = x_v W_v + b_v
        out = (softmax(q kᵀ / √H, over the keys that the mask allows) v) W_o + b_o

    Parameters, their names and float32 initial values match Flax's layer, and so do the names and
    the order of its arguments. Outputs are the same as those of `flax_mha.MultiHeadAttention`.

    Args:
      in_features: the features of inputs_q, D.
      in_kv_features: the features of inputs_k and inputs_v, D' (default: D); 0 for a layer without
        parameters for keys and values, which is always given `kv`.
      decode: True to keep the keys and values of earlier calls, for which `init_cache` makes room;
        may be given in the call instead (default: False).
      deterministic: True for no dropout; may be given in the call, or by `eval()`, instead.
      rngs: the streams of keys for parameters and dropout.
      keep_rngs: True to keep a stream for dropout; else it is given in the call.
      kernel_metadata: the metadata of the projections' kernels, such as `{"out_sharding": (None,
        "model", None)}`.
      out_kernel_metadata: the metadata of the output projection's kernel (default:
        kernel_metadata).
      bias_metadata: the metadata of the biases.
      out_bias_metadata: the metadata of the output projection's bias (default: bias_metadata).
      query_ln_scale_metadata: the metadata of the scale of the queries' norm.
      key_ln_scale_metadata: the metadata of the scale of the keys' norm.
    """

    _: dataclasses.KW_ONLY
    broadcast_dropout: bool = True
    kernel_init: Initializer = nnx.nn.linear.default_kernel_init
    # Their arrays are part of the layer's state.
    mask: masks.MaskLike | None = nnx.data(default=None)  # noqa: RUF009
    scores: Sequence[ScoreMod] = nnx.data(default=())
    rngs: dataclasses.InitVar[nnx.Rngs]
    keep_rngs: dataclasses.InitVar[bool] = True
    kernel_metadata: dataclasses.InitVar[Mapping[str, Any]] = _NOTHING
    out_kernel_metadata: dataclasses.InitVar[Mapping[str, Any]] = _NOTHING
    bias_metadata: dataclasses.InitVar[Mapping[str, Any]] = _NOTHING
    out_bias_metadata: dataclasses.InitVar[Mapping[str, Any]] = _NOTHING
    query_ln_scale_metadata: dataclasses.InitVar[Mapping[str, Any]] = _NOTHING
    key_ln_scale_metadata: dataclasses.InitVar[Mapping[str, Any]] = _NOTHING

    def __post_init__(
        self, rngs: nnx.Rngs, keep_rngs: bool, kernel: Mapping[str, Any],
        out_kernel: Mapping[str, Any], bias: Mapping[str, Any], out_bias: Mapping[str, Any],
        query_ln: Mapping[str, Any], key_ln: Mapping[str, Any],
    ) -> None:  # fmt: skip
        D = self.in_features
        self.check_fields()
        checks.positive(num_heads=self.num_heads, in_features=D)
        checks.optional(out_features=self.out_features, in_kv_features=self.in_kv_features or None)
        self.out_features = self.out_features or D
        self.in_kv_features = D if self.in_kv_features is None else self.in_kv_features
        # Before `sinks` is the parameter, and sizes that were not given are filled in.
        table = self.table(D, self.in_kv_features, self.in_kv_features)
        N, K, H, Hv = self.sizes(D)
        self.num_kv_heads, self.head_dim, self.v_head_dim, self.qkv_features = K, H, Hv, N * H
        self.cache = as_cache_config(self.cache)
        self.scores = as_scores(self.scores)
        for name in _MAYBE:
            setattr(self, name, nnx.data(None))
        self.kv: Any = nnx.data(None)
        self.edits: dict[str, Edit] | None = nnx.data(None)
        metadata = {"query_ln": query_ln, "key_ln": key_ln}
        outs = (out_kernel or kernel, out_bias or bias)
        for name, entry in table.items():
            if isinstance(entry, LinearEntry):
                metadata_of = outs if entry.is_out else (kernel, bias)
                setattr(self, name, self._projection(entry, rngs, *metadata_of))
            elif isinstance(entry, NormEntry):
                # Flax makes a flat scale by default, but linen's has all axes.
                setattr(self, name, entry.norm.module(
                    nnx, math.prod(entry.shape), dtype=self.dtype, param_dtype=self.param_dtype,
                    rngs=rngs, scale_metadata=metadata.get(name, _NOTHING),
                    scale_init=lambda _, __, dtype, entry=entry: jnp.ones(entry.shape, dtype),
                ))  # fmt: skip

        def make(
            name: str, shape: Shape, _: Any, init: Initializer = INIT, is_random: bool = True, /
        ) -> jax.Array:
            key: Any = rngs.params() if is_random else None
            setattr(self, name, nnx.Param(shapes.draw(init, key, shape, self.param_dtype)))
            return getattr(self, name).get_value()

        learned(self.scores, self.score_heads, H, make)
        # Arrays come after those of the scores, as in linen.
        for name, entry in table.items():
            if isinstance(entry, ArrayEntry):
                make(name, entry.shape, entry.names, entry.init, entry.is_random)
                table[name] = dataclasses.replace(entry, init=ZEROS)
        # Two functions are never equal, and few can be pickled. Flax keeps none either.
        for name in ("kernel_init", "out_kernel_init", "bias_init", "out_bias_init"):
            setattr(self, name, None)
        # A tuple, so that the layer's definition can be hashed.
        self._entries = tuple(table.items())
        # The name of Flax's layer, which is an argument of this one too.
        kept = rngs.dropout.fork() if keep_rngs and self.dropout_rate > 0 else None
        self.rngs = kept  # type: ignore[attr-defined]

    def _projection(self, entry: LinearEntry, rngs: nnx.Rngs, *metadata: Any) -> Projection:
        kernel_init, bias_init = (
            functools.partial(shapes.draw, init) for init in self.initializers(entry)
        )
        projection = Projection(
            entry.inputs, entry.features, axis=tuple(range(-len(entry.inputs), 0)),
            use_bias=entry.has_bias, dtype=self.dtype, param_dtype=self.param_dtype,
            precision=self.precision, kernel_init=kernel_init, bias_init=bias_init, rngs=rngs,
            kernel_metadata=metadata[0], bias_metadata=metadata[1],
        )  # fmt: skip
        projection.entry = entry
        return projection

    @overload
    def __call__(
        self, inputs_q: jax.Array, inputs_k: jax.Array | None = ...,
        inputs_v: jax.Array | None = ..., *, return_weights: Literal[False] = ...,
        return_kv: Literal[False] = ..., **options: Unpack[NnxOptions],
    ) -> jax.Array: ...  # fmt: skip
    @overload
    def __call__(
        self, inputs_q: jax.Array, inputs_k: jax.Array | None = ...,
        inputs_v: jax.Array | None = ..., *, return_weights: Literal[True],
        return_kv: Literal[False] = ..., **options: Unpack[NnxOptions],
    ) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip
    @overload
    def __call__(
        self, inputs_q: jax.Array, inputs_k: jax.Array | None = ...,
        inputs_v: jax.Array | None = ..., *, return_weights: bool = ...,
        return_kv: bool = ..., **options: Unpack[NnxOptions],
    ) -> Any: ...  # fmt: skip
    @described_as(linen.MultiHeadAttention.__call__)
    def __call__(  # noqa: D417
        self, inputs_q: jax.Array, inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None, *, mask: masks.MaskLike | None = None,
        bias: jax.Array | None = None, scores: Sequence[ScoreMod] = (),
        positions: jax.Array | tuple[jax.Array | None, jax.Array | None] | None = None,
        head_mask: jax.Array | None = None, lengths: jax.Array | None = None,
        order: Array | None = None, kv: Given | None = None, deterministic: bool | None = None,
        sow_weights: bool = False, rngs: nnx.Rngs | nnx.RngStream | None = None,
        decode: bool | None = None, is_causal: bool = False,
        input_positions: jax.Array | None = None, return_weights: bool = False,
        return_kv: bool = False, **refused: Any,
    ) -> Any:  # fmt: skip
        """Attend from inputs_q to inputs_k and inputs_v.

        Args:
          inputs_k: the inputs of the keys [*B, S, D'] (default: inputs_q, self-attention).
          inputs_v: the inputs of the values [*B, S, D'] (default: inputs_k).
          deterministic: True for no dropout; may be given in the constructor, or by `eval()`,
            instead.
          rngs: the streams of keys for dropout (default: the layer's).
          sow_weights: True to sow the weights [*B, N, T, S] as `attention_weights`, an
            `nnx.Intermediate`, for `nnx.capture`. Outside of it they, and the values of the field
            `capture`, stay in the layer until `nnx.pop`.
          decode: True to append these tokens, of any number, to the cache that `init_cache` made,
            and to attend to all so far, causally (default: the layer's `decode`).
          is_causal: True to see no later key; decoding always is.
          input_positions: the name of `positions` in Flax's layer.
        """
        check_refused(self, refused)
        if input_positions is not None:
            if positions is not None:
                raise ValueError(
                    "input_positions is Flax's name of positions, got both; give positions alone"
                )
            positions = input_positions
        decode = self.decode if decode is None else decode
        inputs_k, inputs_v, cache = resolve.resolve_call(
            kv, inputs_q, inputs_k, inputs_v, as_cache_config(self.cache) if decode else None,
            self.kv.get_value() if decode and self.kv is not None else None,
        )  # fmt: skip
        if isinstance(cache, CacheConfig):
            raise ValueError(
                "decode=True needs a cache, and there is none; call init_cache(x.shape) of inputs "
                "[*B, S, D] as long as all tokens together"
            )
        of_kv = resolve.projected(inputs_q, inputs_k, inputs_v, cache)
        self._check_features(inputs_q, *of_kv)
        if checks.flag("is_causal", is_causal):
            mask = masks.combine(masks.Causal(), mask)
        # What `sow` would not keep is not computed. nnx has no public sign of a capture.
        keeps_none = getattr(flax.config, "nnx_sow_capture_noop", False)
        is_captured = hasattr(self, "__captures__") or not keeps_none
        tap = Tap(self, self.edits or {}, collection=nnx.Intermediate)
        call = Call(
            mask, bias, self._learned() + as_scores(scores), positions, head_mask, lengths, order,
            dropout_rng=self._dropout_rng(deterministic, rngs), return_weights=return_weights,
            tap=self._reading(tap, sow_weights, is_captured),
        )  # fmt: skip
        output = self.compute(self._parameters(), inputs_q, inputs_k, inputs_v, call, cache)
        if output.cache is not None:
            self.kv = output.cache
        return core.returned(output, return_weights, return_kv)

    def init_cache(self, input_shape: Shape, dtype: Dtype | None = None) -> None:
        """Make room in the cache for the tokens of inputs, or empty it.

        A layer without parameters for keys (`in_kv_features=0`) needs no cache.

        Args:
          input_shape: the shape of all inputs together, [*B, S, D].
          dtype: the dtype of the cache: floating point of 16 bits or more, int8, float8_e4m3fn or
            float8_e5m2 (default: that of the field `cache`, or float32).
        """
        shape = checks.sizes("input_shape", input_shape)
        if not self.in_kv_features:
            return
        config = as_cache_config(self.cache)
        config = dataclasses.replace(config, dtype=dtype or config.dtype or jnp.float32)

        # The computation makes the cache it needs, which is all zeros.
        compute = functools.partial(self.compute, self._parameters())
        x = jax.ShapeDtypeStruct(shape, self.param_dtype)
        output = jax.eval_shape(lambda x: compute(x, None, None, Call(), config), x)
        self.kv = collection.constrain_cache(jax.tree.map(jnp.zeros_like, output.cache))

    def set_view(
        self, deterministic: bool | None = None, decode: bool | None = None,
        batch_size: int | Shape | None = None, max_length: int | None = None,
    ) -> None:  # fmt: skip
        """Set what `nnx.view` sets, and make room in the cache.

        Args:
          deterministic: True for no dropout.
          decode: True to decode. With both sizes it makes a cache, if there is none.
          batch_size: the size of the batch, or a tuple of sizes.
          max_length: the number of tokens to make room for.
        """
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
        if decode and self.kv is None and batch_size is not None and max_length is not None:
            batch = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
            dtype = as_cache_config(self.cache).dtype or self.dtype
            self.init_cache((*batch, max_length, self.in_features), dtype)

    def _check_features(self, *inputs: Any) -> None:
        if not self.in_kv_features and inputs[1] is not None:
            raise ValueError(
                "a layer of in_kv_features=0 has no keys and values of its own; give kv= in the "
                "call, or leave in_kv_features out"
            )
        D, Dk = self.in_features, self.in_kv_features
        expected = {"inputs_q": D, "inputs_k": Dk, "inputs_v": Dk}
        for (name, features), x in zip(expected.items(), inputs, strict=True):
            if x is not None and x.shape[-1] != features:
                raise ValueError(
                    f"{name} must have {features} features, as the layer was made for, got "
                    f"{x.shape}; change in_features or in_kv_features"
                )

    def _learned(self) -> tuple[ScoreMod, ...]:
        """Return the layer's scores with their parameters."""

        def read(name: str, *_: Any) -> Any:
            return getattr(self, name).get_value()

        head_dim: Any = self.head_dim
        return learned(self.scores, self.score_heads, head_dim, read)

    def _parameters(self) -> dict[str, Any]:
        """Return the parameters by name."""
        return {name: self._read(getattr(self, name), entry) for name, entry in self._entries}

    @staticmethod
    def _read(module: Any, entry: Entry) -> Any:
        if isinstance(entry, ArrayEntry):
            return module.get_value()
        if isinstance(entry, NormEntry):
            return module
        if isinstance(module, Projection):
            return module._weights()
        # A module that a user has put there is called.
        return Linear(None, None, entry.names, len(entry.inputs), entry.rows, module=module)

    def _dropout_rng(
        self, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None
    ) -> jax.Array | None:
        """Return a key for dropout, or None for no dropout."""
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
        stream = self.rngs if rngs is None else rngs  # type: ignore[attr-defined]
        stream = stream.dropout if isinstance(stream, nnx.Rngs) else stream
        if stream is None:
            raise ValueError(
                "dropout needs rngs, and the layer has kept none; give rngs= in the call, or "
                "keep_rngs=True"
            )
        return stream()

    @property
    def cached_key(self) -> jax.Array | None:
        """The keys in the cache, as Flax's layer has them: [*B, S, K, H]."""
        return None if self.kv is None else jnp.swapaxes(self.kv.get_value().key, -3, -2)

    @property
    def cached_value(self) -> jax.Array | None:
        """The values in the cache, [*B, S, K, Hv]."""
        return None if self.kv is None else jnp.swapaxes(self.kv.get_value().value, -3, -2)

    @property
    def cache_index(self) -> jax.Array | None:
        """The number of tokens in the cache of each example, int32 [*B]."""
        return None if self.kv is None else self.kv.get_value().length


@dataclasses.dataclass(eq=False, repr=False)
class MultiHeadLatentAttention(Latent, MultiHeadAttention):
    """`flax_mha.variants.MultiHeadLatentAttention` in nnx."""


@dataclasses.dataclass(eq=False, repr=False)
class DifferentialAttention(Differential, MultiHeadAttention):
    """`flax_mha.variants.DifferentialAttention` in nnx."""


@dataclasses.dataclass(eq=False, repr=False)
class ForgettingAttention(Forgetting, MultiHeadAttention):
    """`flax_mha.variants.ForgettingAttention` in nnx."""


@dataclasses.dataclass(eq=False, repr=False)
class TalkingHeadsAttention(TalkingHeads, MultiHeadAttention):
    """`flax_mha.variants.TalkingHeadsAttention` in nnx."""


@dataclasses.dataclass(eq=False, repr=False)
class ChosenBlocksAttention(ChosenBlocks, MultiHeadAttention):
    """`flax_mha.variants.ChosenBlocksAttention` in nnx."""
