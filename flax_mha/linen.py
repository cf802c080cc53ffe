"""The layers of `flax_mha` for linen."""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import flax.linen as nn
import jax
from flax.typing import Initializer

from flax_mha import masks, sharding
from flax_mha.base.arguments import check_refused
from flax_mha.base.coordinates import Array
from flax_mha.base.shapes import Shape
from flax_mha.cache import CacheConfig, KVCache, collection, resolve
from flax_mha.cache.resolve import CacheLike, KVLike
from flax_mha.layer import core
from flax_mha.layer.linear import Projection, make_parameter
from flax_mha.layer.parameters import ArrayEntry, Entry, NormEntry, Table
from flax_mha.layer.settings import Call, Settings, reading
from flax_mha.scores import INIT, ScoreMod, as_scores, learned
from flax_mha.sharding import rules
from flax_mha.taps.tap import tap_of


class LayerOptions(TypedDict, total=False):
    """The arguments of a layer's call that models pass on, besides inputs and `return_…`.

    `MultiHeadAttention.__call__` describes them.
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
    dropout_rng: jax.Array | None


class MultiHeadAttention(Settings, nn.Module):
    """Multi-head attention, a drop-in for `flax.linen.MultiHeadDotProductAttention`.

        q = x_q W_q + b_q,   k = x_k W_k + b_k,   v = x_v W_v + b_v
        out = (softmax(q kᵀ / √H, over the keys that the mask allows) v) W_o + b_o

    with W_q [D, N, H], W_k [D, K, H], W_v [D, K, Hv], W_o [N, Hv, D_out]. Parameter names, shapes
    and float32 initial values match Flax's layer. `flax_mha.base.shapes` describes the letters.

    Attributes:
      num_heads: the number of query heads, N.
      qkv_features: the features of all query heads, N·H (default: the features of inputs_q).
      out_features: the features of the output, D_out (default: the features of inputs_q).
      num_kv_heads: the number of key/value heads, K, each shared by N/K query heads (default: N).
      head_dim: the features of a head, H (default: qkv_features / N).
      v_head_dim: the features of a head's values, Hv (default: H).
      mask: a mask for all calls, such as `masks.Causal()`.
      rotary: a rotation of queries and keys by position, such as `positions.Rotary()`.
      scores: functions of the scores for all calls, such as `(scores.SoftCap(50.0),)`.
      scale: the factor of the scores (default: 1/√H). "learned" makes it a parameter of each head,
        `score_scale`, which starts at that value.
      sinks: True to learn an extra score for each head, which takes weight and has no value.
      normalizer: the function from scores to weights: "softmax", or, in the kernel `reference`,
        "sigmoid" or "softpick".
      kernel: the name of the attention kernel, or "auto"; see `flax_mha.explain`.
      dropout_rate: the dropout rate of the attention weights.
      broadcast_dropout: True for one dropout pattern for all examples and heads (Flax's default).
      deterministic: True for no dropout. A call can give it instead.
      decode: True to keep keys and values in the collection `cache` (see `flax_mha.cache`). `init`
        with an input of the full length makes room. Each `apply` appends its tokens.
      cache: the format of the cache, such as `CacheConfig(dtype="int8")`.
      capture: the internals to sow as intermediates in each call. `Capture(("z", "entropy"))` sows
        `attention_z` and `attention_entropy`.
      qk_norm: the norm of queries and keys, such as `QKNorm("rmsnorm")`.
      gate: "head" or "feature" to scale the heads' outputs by the sigmoid of a projection of
        inputs_q, `output_gate`: one number for each head, or for each of its features (Qwen3-Next).
      exclusive: True to remove from each head's output its part along the token's own value,
        z − (z·v / v·v)·v, in self-attention (Zhai, "Exclusive Self Attention", 2026).
      use_bias: True if all projections have biases, or the names of the ones that have, such as
        ("query", "value", "out").
      project_out: False to return the concatenated outputs of the heads.
      dtype: the dtype of the computation (default: promoted from inputs and parameters). The
        softmax is computed in at least float32.
      param_dtype: the dtype of the parameters.
      precision: the precision of the matrix products, a `jax.lax.Precision`.
      kernel_init: the initializer of the projections' kernels.
      out_kernel_init: the initializer of the output projection's kernel (default: kernel_init).
      bias_init: the initializer of the biases.
      out_bias_init: the initializer of the output projection's bias (default: bias_init).
      normalize_qk: True for a LayerNorm without bias on each head's queries and keys (ViT-22B).
      attention_fn: a function with the signature of `nn.dot_product_attention`, called in place of
        the kernels. The default, `flax_mha.attention_fn`, and None stand for the kernels.
      force_fp32_for_softmax: an argument for `attention_fn`. Kernels ignore it.
      partitioned: True to box the parameters with their logical axis names, as
        `nn.with_logical_partitioning` does.

    Source: Vaswani et al., "Attention Is All You Need", 2017.
    """

    _: dataclasses.KW_ONLY  # Flax adds `parent` and `name`.

    @nn.compact
    def __call__(
        self, inputs_q: jax.Array, inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None, *, mask: masks.MaskLike | None = None,
        bias: jax.Array | None = None, scores: Sequence[ScoreMod] = (),
        positions: jax.Array | tuple[jax.Array | None, jax.Array | None] | None = None,
        head_mask: jax.Array | None = None, lengths: jax.Array | None = None,
        order: Array | None = None, kv: KVLike | None = None, deterministic: bool | None = None,
        sow_weights: bool = False, dropout_rng: jax.Array | None = None,
        return_weights: bool = False, return_kv: bool = False, **refused: None,
    ) -> Any:  # fmt: skip
        """Attend from inputs_q to inputs_k and inputs_v.

        Args:
          inputs_q: the inputs of the queries [*B, T, D].
          inputs_k: the inputs of the keys [*B, S, D'] of another sequence (default: inputs_q). With
            `decode` they are other inputs of the same tokens, whose keys are appended.
          inputs_v: the inputs of the values [*B, S, D''] (default: inputs_k).
          mask: a mask that joins the field `mask`, or an array of bools that broadcasts to
            [*B, N, T, S], True where a query may attend to a key. For a mask of keys [*B, S], pass
            `masks.Keys(array)`.
          bias: an array that is added to the scores; broadcasts to [*B, N, T, S].
          scores: more functions of the scores, after the field's.
          positions: the positions of the tokens of inputs_q for `rotary`, int [T] or [*B, T], or a
            pair of these for queries and keys (default: 0 … T−1, continued in decoding). In a pair,
            None stands for the default, and for keys of the same tokens for the queries' positions.
          head_mask: factors of the heads' outputs, [N] or [*B, N]: 0 prunes a head.
          lengths: the number of real tokens of inputs_q in each example, int [*B], from the first
            on (default: all). The others are padding, whose values, NaN included, reach no outputs
            or gradients. Hide keys of another sequence by the mask, such as `masks.Lengths(n)`.
          order: the place of each token in the sequence, int [T], if tokens come in another order,
            such as `sharding.zigzag(T, 8)`. Arrays in masks are in the order of the inputs.
          kv: keys and values in place of inputs_k: another layer's, as `return_kv` returns them, or
            a pair of [*B, S, K, H] and [*B, S, K, Hv]. The layer then needs no parameters for them.
            Or `cache.Encoded(inputs_k)`, whose keys and values a layer that decodes keeps.
          deterministic: True for no dropout. The constructor can set it instead.
          sow_weights: True to sow the weights [*B, N, T, S] into `intermediates/attention_weights`,
            as `capture=Capture(("weights",))` does.
          dropout_rng: a key for dropout (default: `make_rng('dropout')`).
          return_weights: True to also return the weights, before dropout.
          return_kv: True to also return the keys and values, for other layers to attend to.
          **refused: arguments that only Flax's layer has, which must be None.

        Returns:
          out [*B, T, D_out], or a tuple of it, the weights, and the keys and values.

        Raises:
          ValueError: if sizes do not fit, or the call needs a cache and there is none.
          TypeError: if a dtype is not supported.
        """
        check_refused(self, refused)
        with rules.undivided_tokens(bool(self.decode)):
            config = self.cache or CacheConfig() if self.decode else None
            inputs_k, inputs_v, cache = resolve.resolve_call(
                kv, inputs_q, inputs_k, inputs_v, config, self._kept(), self.is_initializing()
            )
            D, of_kv = inputs_q.shape[-1], resolve.projected(inputs_q, inputs_k, inputs_v, cache)
            table = self.checked_table(D, *(0 if x is None else x.shape[-1] for x in of_kv))
            call = Call(
                mask, bias, with_parameters(self, self.scores, self, D) + as_scores(scores),
                positions, head_mask, lengths, order, return_weights=return_weights,
                dropout_rng=self._dropout_rng(deterministic, dropout_rng),
                tap=reading(self, tap_of(self, prefix="attention_"), sow_weights),
            )  # fmt: skip
            p = {name: self._make(name, entry) for name, entry in table.items()}
            output = self.compute(p, inputs_q, inputs_k, inputs_v, call, cache)
            if output.cache is not None and output.cache is not cache:
                new = collection.constrain_cache(output.cache)
                self.put_variable("cache", "kv" if new.queries is None else "memory", new)
        return core.returned(output, return_weights, return_kv)

    @nn.nowrap
    def compute(
        self, p: Mapping[str, Any], x_q: jax.Array, x_k: jax.Array | None, x_v: jax.Array | None,
        call: Call, cache: CacheLike,
    ) -> core.Output:  # fmt: skip
        """Compute the layer from arrays. A variant overrides this, `table` and `check_fields`.

        Arguments are those of `core.project_heads`.
        """
        heads = core.project_heads(p, self, x_q, x_k, x_v, call, cache, in_kernel=True)
        return core.attend(p, self, heads, call, cache)

    @nn.nowrap
    def checked_table(self, D: int, Dk: int, Dv: int) -> Table:
        """Return `table` after a check of the fields, both made once for equal fields and sizes.

        Linen clones a layer for each call, so the layer itself can't keep them.
        """
        names = self.__dataclass_fields__.keys() - {"parent", "name"}
        fields = {name: getattr(self, name) for name in names}
        cls: Any = type(self)
        with contextlib.suppress(TypeError):  # A mask with arrays has no hash.
            return _checked_table(cls, D, Dk, Dv, **fields)
        self.check_fields()
        return self.table(D, Dk, Dv)

    @nn.nowrap
    def _make(self, name: str, entry: Entry) -> Any:
        if isinstance(entry, NormEntry):
            return entry.norm.module(nn, dtype=self.dtype, param_dtype=self.param_dtype, name=name)
        if isinstance(entry, ArrayEntry):
            init = sharding.named(entry.init, entry.names, self.partitioned)
            return make_parameter(self, name, init, entry.shape, self.param_dtype)
        kernel_init, bias_init = self.initializers(entry)
        return Projection(
            entry.features, entry.names, len(entry.inputs), entry.rows, kernel_init,
            bias_init if entry.has_bias else None, self.dtype, self.param_dtype, self.precision,
            self.partitioned, name=name,
        ).weights(entry.inputs)  # fmt: skip

    @nn.nowrap
    def _kept(self) -> KVCache | None:
        """Return the cache of earlier calls, or None if there is none."""
        held = self.variables.get("cache", {}) if self.decode else {}
        caches = [held[name] for name in ("kv", "memory") if name in held]
        if not held or (self.is_initializing() and not caches):
            return None
        if len(caches) != 1 or not isinstance(caches[0], KVCache):
            raise TypeError(
                f"a layer's collection 'cache' must have one flax_mha.cache.KVCache, kv or memory, "
                f"got {[*held]}; start from an empty one, which init with decode=True returns"
            )
        return caches[0]

    @nn.nowrap
    def _dropout_rng(self, told: bool | None, rng: jax.Array | None) -> jax.Array | None:
        """Return a key for dropout, or None for no dropout."""
        if not self.dropout_rate or nn.merge_param("deterministic", self.deterministic, told):
            return None
        return self.make_rng("dropout") if rng is None else rng


@functools.lru_cache(256, typed=True)  # 1 is not True.
def _checked_table(cls: type[MultiHeadAttention], D: int, Dk: int, Dv: int, **fields: Any) -> Table:
    layer = cls(**fields, parent=None)
    layer.check_fields()
    return layer.table(D, Dk, Dv)


def with_parameters(
    module: nn.Module, scores: Sequence[ScoreMod], like: MultiHeadAttention, features: int
) -> tuple[ScoreMod, ...]:
    """Return scores with parameters of a linen module, for the heads of the layer `like`."""

    def make(name: str, shape: Shape, names: Any, init: Initializer = INIT, /) -> Any:
        init = sharding.named(init, names, like.partitioned)
        return make_parameter(module, name, init, shape, like.param_dtype)

    if isinstance(scores, Sequence) and not scores:  # As in most layers. Others are checked.
        return ()
    return learned(scores, like.score_heads, like.sizes(features)[2], make)


class MultiHeadDotProductAttention(MultiHeadAttention):
    """`MultiHeadAttention` under the name of Flax's layer, and with its `broadcast_dropout`.

    Flax names a submodule after its class, and draws initial values by these names. In a model that
    builds `nn.MultiHeadDotProductAttention(...)`, this class keeps both.
    """

    _: dataclasses.KW_ONLY
    broadcast_dropout: bool = True


class SelfAttention(MultiHeadDotProductAttention):
    """`MultiHeadDotProductAttention` under the name of `flax.linen.SelfAttention`.

    As there, the second positional argument of a call is the mask.
    """

    @nn.compact
    def __call__(  # type: ignore[override]
        self, inputs_q: jax.Array, mask: masks.MaskLike | None = None,
        deterministic: bool | None = None, dropout_rng: jax.Array | None = None,
        sow_weights: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        """Attend from inputs_q to itself.

        Args:
          inputs_q: the inputs [*B, T, D].
          mask: an array or a mask.
          deterministic: True for no dropout.
          dropout_rng: a key for dropout.
          sow_weights: True to sow the weights.
          **options: other arguments of `MultiHeadAttention.__call__`.
        """
        return super().__call__(
            inputs_q, mask=mask, deterministic=deterministic, dropout_rng=dropout_rng,
            sow_weights=sow_weights, **options,
        )  # fmt: skip
