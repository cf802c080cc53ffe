# Over 300 lines: half of them say what the fields and arguments mean.
"""The linen layer: its fields, its parameters, and a call of the core."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Self, Unpack, overload

import flax.linen as nn
import jax
from flax.typing import Initializer

from flax_mha import masks, sharding
from flax_mha.base import checks, shapes
from flax_mha.base.arguments import check_renamed
from flax_mha.base.coordinates import Array
from flax_mha.base.shapes import Shape
from flax_mha.cache import Memory, as_cache_config, collection, sources
from flax_mha.cache.sources import Given, Shared
from flax_mha.layer import core
from flax_mha.layer.linear import Projection
from flax_mha.layer.parameters import ArrayEntry, Entry, NormEntry
from flax_mha.layer.settings import Call, CallOptions, captured
from flax_mha.layer.standard import Attention
from flax_mha.scores import INIT, ScoreMod, as_scores, learned
from flax_mha.sharding import rules


class LayerOptions(CallOptions, total=False):
    """The arguments of a layer's call that do not change what it returns, for type checkers."""

    dropout_rng: jax.Array | None


class MultiHeadAttention(Attention, nn.Module):
    """Multi-head attention, a drop-in for `flax.linen.MultiHeadDotProductAttention`.

        q = x_q W_q + b_q,   k = x_k W_k + b_k,   v = x_v W_v + b_v
        out = (softmax(q kᵀ / √H, over the keys that the mask allows) v) W_o + b_o

    with W_q [D, N, H], W_k [D, K, H], W_v [D, K, Hv], W_o [N, Hv, D_out]. Parameter names, shapes
    and initial values are those of Flax's layer, so its checkpoints load as they are. See
    `flax_mha.shapes` for the letters.

    Attributes:
      num_heads: N.
      dtype: of the computation (default: promoted from inputs and parameters). The softmax is
        computed in float32 at least.
      param_dtype: of the parameters.
      qkv_features: N·H (default: the features of inputs_q).
      out_features: D_out (default: the features of inputs_q).
      broadcast_dropout: one dropout pattern for all rows of the batch and heads (Flax's default
        is True).
      dropout_rate: of the attention weights.
      deterministic: if True, no dropout; here or in the call.
      precision: of the matrix products, see `jax.lax.Precision`.
      kernel_init: initializer of the projections.
      out_kernel_init: of the output projection (default: kernel_init).
      bias_init: of the biases.
      out_bias_init: of the output projection's bias (default: bias_init).
      use_bias: whether the projections have biases, or the names of those that do, such as
        ("query", "value", "out").
      attention_fn: a function with the signature of `nn.dot_product_attention`, which computes
        attention instead of the kernels, with its own answer for queries that see nothing. It is
        called as Flax's layer calls it; keys and values of groups are repeated to N heads, and
        masks given as one table. What it has no parameter for is an error (default: the kernels).
      force_fp32_for_softmax: for `attention_fn`; the kernels' softmax is in float32 anyhow, and
        weights that are sown are in the compute dtype either way.
      decode: keep keys and values in the `cache` collection (see `flax_mha.cache`). `init` with an
        input of the full length makes room for that many tokens; each `apply` appends the tokens
        it is given (one or more) and attends to all so far, each token to itself and those before.
        Beyond the capacity the output is NaN. Cross-attention keeps the keys and values of
        inputs_k, and attends to them again where none are given.
      cache: how the cache holds them, such as `CacheConfig(dtype="int8")`.
      normalize_qk: apply a LayerNorm without bias to queries and keys, per head (ViT-22B).
      qk_norm: another norm of those, such as `QKNorm("rmsnorm")`.
      gate: scale the heads' outputs by a sigmoid of a projection of inputs_q, `output_gate`: "head"
        has one gate a head, "feature" one for each of its features (Qwen3-Next).
      num_kv_heads: K, key/value heads shared by groups of N/K query heads (default: N).
      head_dim: H, whatever the model's size (default: qkv_features / N).
      v_head_dim: Hv (default: H).
      project_out: if False, there is no output projection: the heads' outputs are concatenated.
      kernel: which attention kernel runs, see `flax_mha.explain`.
      mask: a mask that always holds, such as `masks.Causal()`.
      scores: functions of the scores that always apply, such as `(scores.SoftCap(50.0),)`.
      scale: of the scores (default: 1/√H); "learned" is one for each head, `score_scale`, which
        starts there.
      sinks: learn one more score a head, that takes weight in the softmax and gives nothing.
      capture: what to sow into `intermediates` of each call, such as
        `Capture(("weights", "entropy"))`, as `attention_weights`, `attention_entropy` and so on.
        The output is the same to the bit.
      rotary: turns queries and keys by their position, such as `positions.Rotary()`.
      normalizer: how scores become weights: "softmax", "sigmoid" or "softpick", the last two by the
        kernel `reference` alone; see `flax_mha.kernels.reference`.
      partitioned: box the parameters with their logical axis names, as
        `nn.with_logical_partitioning` does.

    Source: Vaswani et al., "Attention Is All You Need", 2017.
    """

    num_heads: int
    _: dataclasses.KW_ONLY
    qkv_features: int | None = None
    out_features: int | None = None
    num_kv_heads: int | None = None
    decode: bool = False
    partitioned: bool = False

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        """Refuse the names that fields had in earlier releases."""
        check_renamed(cls.__name__, fields)
        return super().__new__(cls)

    @overload
    def __call__(
        self, inputs_q: jax.Array, inputs_k: jax.Array | None = ...,
        inputs_v: jax.Array | None = ...,
        *, return_weights: Literal[False] = ..., return_kv: Literal[False] = ...,
        **options: Unpack[LayerOptions],
    ) -> jax.Array: ...  # fmt: skip
    @overload
    def __call__(
        self, inputs_q: jax.Array, inputs_k: jax.Array | None = ...,
        inputs_v: jax.Array | None = ...,
        *, return_weights: Literal[True], return_kv: Literal[False] = ...,
        **options: Unpack[LayerOptions],
    ) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip
    @overload
    def __call__(
        self, inputs_q: jax.Array, inputs_k: jax.Array | None = ...,
        inputs_v: jax.Array | None = ...,
        *, return_weights: Literal[False] = ..., return_kv: Literal[True],
        **options: Unpack[LayerOptions],
    ) -> tuple[jax.Array, Shared]: ...  # fmt: skip
    @overload
    def __call__(
        self, inputs_q: jax.Array, inputs_k: jax.Array | None = ...,
        inputs_v: jax.Array | None = ...,
        *, return_weights: bool, return_kv: Literal[False] = ..., **options: Unpack[LayerOptions],
    ) -> jax.Array | tuple[jax.Array, jax.Array]: ...  # fmt: skip
    @overload
    def __call__(
        self, inputs_q: jax.Array, inputs_k: jax.Array | None = ...,
        inputs_v: jax.Array | None = ...,
        *, return_weights: bool = ..., return_kv: bool = ..., **options: Unpack[LayerOptions],
    ) -> Any: ...  # fmt: skip
    @nn.compact
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: masks.MaskLike | None = None,
        bias: jax.Array | None = None,
        scores: Sequence[ScoreMod] = (),
        positions: jax.Array | tuple[jax.Array, jax.Array] | None = None,
        head_mask: jax.Array | None = None,
        lengths: jax.Array | None = None,
        order: Array | None = None,
        kv: Given | None = None,
        deterministic: bool | None = None,
        dropout_rng: jax.Array | None = None,
        sow_weights: bool = False,
        return_weights: bool = False,
        return_kv: bool = False,
    ) -> Any:
        """Attends from inputs_q to inputs_k and inputs_v.

        Args:
          inputs_q: [*B, T, D].
          inputs_k: [*B, S, D'] (default: inputs_q, self-attention).
          inputs_v: [*B, S, D''] (default: inputs_k).
          mask: joins the `mask` field; a bool array that broadcasts to [*B, N, T, S] is taken
            too, True where a query may see a key: one of two axes is [T, S], one of three [N, T,
            S]. A mask of keys [*B, S] is `masks.Keys(array)`.
          bias: added to the scores; broadcasts to [*B, N, T, S].
          scores: more functions of the scores, after those of the field.
          positions: int [T] or [*B, T], or a pair of those for queries and keys: where the tokens
            stand for `rotary` (default: 0 … T−1, in decoding continued). Masks count tokens in
            the order given, whatever this says.
          lengths: int [*B], how many tokens of inputs_q are real in each row, from its first on
            (default: all). The others are neither attended to nor kept, and attend to nothing;
            what they hold, NaN included, reaches neither outputs nor gradients.
          order: int [T], where the tokens stand in the sequence if they are given in another order,
            such as `sharding.zigzag(T, 8)`: what masks, scores, dropout and, unless `positions`
            says otherwise, `rotary` go by. Arrays in masks line up with the tokens as given.
          kv: keys and values of another layer, as `return_kv` gives them, or any as a pair of
            [*B, S, K, H] and [*B, S, K, Hv]: attended to as they are, in place of inputs_k. Where
            the other layer decodes, they are those of its cache, and this one keeps none. A layer
            that is initialized with them has no parameters for keys and values.
          head_mask: [N] or [*B, N], scales the heads' outputs: 0 prunes a head.
          deterministic: if True, no dropout; here or in the constructor.
          dropout_rng: a key for dropout (default: `make_rng('dropout')`).
          sow_weights: sow the weights [*B, N, T, S] into `intermediates/attention_weights`, as
            `capture=Capture(("weights",))` does.
          return_weights: also return them. Both as before dropout.
          return_kv: also return the keys and values, for other layers to attend to.

        Returns:
          out [*B, T, D_out], or a tuple of it, the weights and the keys and values, as asked for.

        Raises:
          ValueError: if sizes do not fit.
          TypeError: if a dtype is not supported.
        """
        checks.fields(self)
        checks.flag("sow_weights", sow_weights)
        with rules.undivided_tokens(self.decode):
            cross = inputs_k is not None and inputs_k is not inputs_q
            cache = self._held(cross) if kv is None else sources.as_source(kv, inputs_k, inputs_v)
            if isinstance(cache, Memory | Shared):
                shapes.check_inputs(inputs_q, inputs_q, inputs_q)
            else:
                inputs_k, inputs_v = shapes.resolve_inputs(inputs_q, inputs_k, inputs_v)
            listened = self.is_mutable_collection("intermediates")
            own = with_parameters(self, self.scores, self, inputs_q.shape[-1])
            call = Call(
                mask, bias, own + as_scores(scores), positions, head_mask, lengths, order,
                dropout_rng=self._dropout_rng(deterministic, dropout_rng),
                return_weights=return_weights,
                capture=captured(self.capture, sow_weights, listened, self.attention_fn),
                sower=self if sow_weights else None,
            )  # fmt: skip
            inputs = (inputs_q, inputs_k, inputs_v)
            p = self._parameters(*(0 if x is None else x.shape[-1] for x in inputs))
            output = self.compute(p, inputs_q, inputs_k, inputs_v, call, cache)
            if output.cache is not None and output.cache is not cache:
                name = "memory" if isinstance(output.cache, Memory) else "kv"
                self.put_variable("cache", name, collection.constrain_cache(output.cache))
        for name, x in output.captured.items():
            self.sow("intermediates", f"attention_{name}", x)
        return core.returned(output, return_weights, return_kv)

    @nn.nowrap
    def _parameters(self, *features: int) -> dict[str, Any]:
        """Return the parameters by name, for inputs of those features."""
        return {name: self._make(name, entry) for name, entry in self.table(*features).items()}

    @nn.nowrap
    def _make(self, name: str, entry: Entry) -> Any:
        if isinstance(entry, NormEntry):
            return entry.norm.module(nn, dtype=self.dtype, param_dtype=self.param_dtype, name=name)
        if isinstance(entry, ArrayEntry):
            init = sharding.named(entry.init, entry.names, self.partitioned)
            return self.param(name, init, entry.shape, self.param_dtype)
        kernel_init, bias_init = self.kernel_init, self.bias_init
        if entry.is_out:
            kernel_init = self.out_kernel_init or kernel_init
            bias_init = self.out_bias_init or bias_init
        return Projection(
            entry.features, entry.names, len(entry.inputs), entry.rows, kernel_init,
            bias_init if entry.has_bias else None, self.dtype, self.param_dtype, self.precision,
            self.partitioned, name=name,
        ).weights(entry.inputs)  # fmt: skip

    @nn.nowrap
    def _held(self, cross: bool) -> Any:
        """What the layer holds of earlier calls, or what it is to make of this one."""
        if not self.decode:
            return None
        # Whether the mask fits a ring is known before there is one.
        config = as_cache_config(self.cache)
        config.window(self.mask)
        if self.has_variable("cache", "kv"):
            return self.get_variable("cache", "kv")
        if not cross and self.has_variable("cache", "memory"):
            return self.get_variable("cache", "memory")
        return config

    @nn.nowrap
    def _dropout_rng(self, deterministic: bool | None, rng: Any) -> jax.Array | None:
        """A key, if there is to be dropout."""
        if self.dropout_rate == 0:
            return None
        said = nn.merge_param("deterministic", self.deterministic, deterministic)
        if checks.flag("deterministic", said):
            return None
        return self.make_rng("dropout") if rng is None else rng


def with_parameters(
    module: nn.Module, scores: Sequence[ScoreMod], like: MultiHeadAttention, features: int
) -> tuple[ScoreMod, ...]:
    """The scores of a linen module with its parameters, as those of the layer on such inputs."""

    def make(name: str, shape: Shape, names: Any, init: Initializer = INIT, /) -> jax.Array:
        init = sharding.named(init, names, like.partitioned)
        return module.param(name, init, shape, like.param_dtype)

    return learned(scores, like.num_heads, like.sizes(features)[2], make) if scores else ()


class MultiHeadDotProductAttention(MultiHeadAttention):
    """`MultiHeadAttention` under the name of Flax's layer, and with its defaults.

    Flax names a submodule that has no name after its class, and draws initial values by these
    names: in a model that builds `nn.MultiHeadDotProductAttention(...)` this class in its place
    gives the same parameters under the same names, so that checkpoints load as they are. Of the
    fields only the default of `broadcast_dropout` differs from `MultiHeadAttention`.
    """

    _: dataclasses.KW_ONLY
    broadcast_dropout: bool = True


class SelfAttention(MultiHeadDotProductAttention):
    """`MultiHeadDotProductAttention` under the name of `flax.linen.SelfAttention`.

    The second argument of its call by position is the mask, as there. In a model that builds
    `nn.SelfAttention(...)` this class gives the same parameters under the same names.
    """

    @nn.compact
    def __call__(  # type: ignore[override]
        self,
        inputs_q: jax.Array,
        mask: masks.MaskLike | None = None,
        deterministic: bool | None = None,
        dropout_rng: jax.Array | None = None,
        sow_weights: bool = False,
        **options: Any,
    ) -> Any:
        """Attends from inputs_q to itself.

        Args:
          inputs_q: [*B, T, D].
          mask: which keys a query may see; see `MultiHeadAttention`.
          deterministic: if True, no dropout.
          dropout_rng: a key for dropout.
          sow_weights: sow the weights.
          **options: more arguments of the call of `MultiHeadAttention`.

        Returns:
          See `MultiHeadAttention`.

        Raises:
          ValueError, TypeError: see `MultiHeadAttention`.
        """
        return super().__call__(
            inputs_q, mask=mask, deterministic=deterministic, dropout_rng=dropout_rng,
            sow_weights=sow_weights, **options,
        )  # fmt: skip
