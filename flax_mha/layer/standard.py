"""Multi-head attention for linen and nnx: its table of parameters, and its computation."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import flax.linen as nn
import jax
from flax.typing import Initializer

from flax_mha.base import checks, shapes
from flax_mha.base.arguments import check_given, hidden_field
from flax_mha.cache import as_cache_config
from flax_mha.cache.resolve import CacheLike
from flax_mha.kernels.call.capture import Capture, as_capture
from flax_mha.layer import core
from flax_mha.layer.parameters import ArrayEntry, LinearEntry, NormEntry, Table
from flax_mha.layer.qk_norm import as_qk_norm
from flax_mha.layer.settings import ZEROS, Call, Settings, has_bias
from flax_mha.taps.contexts import asked
from flax_mha.taps.tap import Tap

# One function for equal values, so that equal nnx layers have equal definitions.
_constant = functools.cache(nn.initializers.constant)
# The checked tables by class, sizes and fields.
_TABLES: dict[Any, Table] = {}
_MOST_TABLES = 256


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Attention(Settings):
    """A kind of attention: a table of parameters, and a function of arrays.

    The layers of linen and nnx inherit from it. They make the parameters that `table` lists, and
    call `compute` with them. Another kind of attention overrides both.
    """

    if TYPE_CHECKING:  # Fields that linen and nnx have at the places of Flax's layers.
        qkv_features: int | None = dataclasses.field(default=None, kw_only=False)
        out_features: int | None = dataclasses.field(default=None, kw_only=False)
        num_kv_heads: int | None = dataclasses.field(default=None, kw_only=False)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse attributes that `__init__` would replace by the values of fields."""
        inherited = {x for base in cls.__mro__ for x in getattr(base, "__dataclass_fields__", ())}
        for name in vars(cls).keys() & inherited - vars(cls).get("__annotations__", {}).keys():
            raise hidden_field(cls, name)
        super().__init_subclass__(**kwargs)

    if not TYPE_CHECKING:  # Type checkers and editors show the fields.

        def __new__(cls, *args: Any, **fields: Any) -> Self:
            """Refuse values that only Flax's layers take."""
            check_given(cls.__name__, fields)
            return super().__new__(cls)

    @property
    def mixes_heads(self) -> bool:
        """True if a head's output depends on other heads, so that none can be removed alone."""
        return self.qk_norm is not None and self.qk_norm.over_heads

    @property
    def score_heads(self) -> int:
        """The number of heads that scores and weights have."""
        return self.num_heads

    def check_fields(self) -> None:
        """Check the fields as far as it needs no inputs."""
        checks.fields(self)
        if self.rotary is not None:
            remedy = "give positions.Rotary(), with its parentheses"
            checks.function("rotary", self.rotary, "(x, positions) -> x", remedy, 2)
        as_capture(self.capture, in_layer=True)
        cache = as_cache_config(self.cache)
        if self.decode or not isinstance(self, nn.Module):  # In nnx a call may decode.
            cache.window(self.mask)

    def checked_table(self, D: int, Dk: int, Dv: int) -> Table:
        """Return `table`, checking fields and building it once for equal fields and sizes.

        Linen clones a layer for each call. Fields that can't be hashed, such as masks with arrays,
        are checked in each.
        """
        names = (field.name for field in dataclasses.fields(self))
        fields = [getattr(self, name) for name in names if name not in ("parent", "name")]
        key = _hashable((type(self), D, Dk, Dv, *fields, *map(type, fields)))  # 1 equals True.
        table = _TABLES.get(key)
        if table is None:
            self.check_fields()
            table = self.table(D, Dk, Dv)
            if key is not None:
                if len(_TABLES) >= _MOST_TABLES:
                    _TABLES.clear()  # At once, as other threads may read it.
                _TABLES[key] = table
        return table

    def _reading(self, tap: Tap, sow_weights: bool, is_captured: bool) -> Tap:
        """Return the tap of a call, with the reads that its fields and `sow_weights` ask for.

        `is_captured` is True if intermediates are collected.
        """
        sow_weights = checks.flag("sow_weights", sow_weights)
        reads, is_custom = asked(tap.module, self.capture), self.custom_attention is not None
        if sow_weights and not is_custom:  # Such a function sows them by itself.
            names = dict.fromkeys((*(reads.what if reads else ()), "weights"))
            reads = dataclasses.replace(reads or Capture(()), what=tuple(names))
        tap.reads = reads if is_captured or is_custom else None
        if (reads or sow_weights) and not is_captured and isinstance(self, nn.Module):
            tap.warn_if_lost()
        tap.sower = tap.module if sow_weights else None
        return tap

    def sizes(self, features: int) -> tuple[int, int, int, int]:
        """Return N, K, H and Hv, for inputs_q with `features` features."""
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
        norm = as_qk_norm(self.qk_norm, self.normalize_qk)
        if norm is not None:
            entries["query_ln"] = NormEntry(H, norm, N if norm.over_heads else None)
        if norm is not None and Dk:
            entries["key_ln"] = NormEntry(H, norm, K if norm.over_heads else None)
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
        checks.optional(out_features=self.out_features)
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
            inits["score_scale"] = _constant(H**-0.5)
        shape = (self.num_heads,)
        return {
            name: ArrayEntry(shape, ("heads",), x, is_random=False) for name, x in inits.items()
        }

    def initializers(self, entry: LinearEntry) -> tuple[Initializer, Initializer]:
        """Return the initializers of an entry's kernel and bias."""
        if not entry.is_out:
            return self.kernel_init, self.bias_init
        return self.out_kernel_init or self.kernel_init, self.out_bias_init or self.bias_init

    def compute(
        self, p: Mapping[str, Any], x_q: jax.Array, x_k: jax.Array | None, x_v: jax.Array | None,
        call: Call, cache: CacheLike,
    ) -> core.Output:  # fmt: skip
        """Return the output of the layer. Another kind of attention overrides this.

        Args:
          p: the parameters by name: `Linear`, norms as functions, arrays.
          x_q: the inputs of the queries [*B, T, D].
          x_k: the inputs of the keys [*B, S, D'], or None, to attend to the tokens of the cache.
          x_v: the inputs of the values [*B, S, D''], or None.
          call: the other arguments.
          cache: the cache of earlier calls, keys and values of another layer, or the `CacheConfig`
            of a cache to make.
        """
        # Not `core.attention`, which is one frame more in every traceback.
        heads = core.project_heads(p, self, x_q, x_k, x_v, call, cache, in_kernel=True)
        return core.attend(p, self, heads, call, cache)


def _hashable(key: Any) -> Any:
    """Return a key, or None if it cannot be hashed."""
    try:
        hash(key)
    except TypeError:
        return None
    return key
