"""Multi-head attention for linen and nnx: its table of parameters, and its computation."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import flax.linen as nn
import jax
from flax.typing import Initializer

from flax_mha.base import checks, shapes
from flax_mha.base.arguments import InitSignature, check_given, hidden_field
from flax_mha.cache import as_cache_config
from flax_mha.kernels.capture import Capture
from flax_mha.layer import core
from flax_mha.layer.parameters import ArrayEntry, LinearEntry, NormEntry, Table
from flax_mha.layer.points import Points, asked
from flax_mha.layer.qk_norm import as_qk_norm
from flax_mha.layer.settings import ZEROS, Call, Settings, has_bias
from flax_mha.scores import ScoreMod, as_scores

# One function for equal values, so that equal nnx layers have equal definitions.
_constant = functools.cache(nn.initializers.constant)
_OF_CALL = {field.name for field in dataclasses.fields(Call)}


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Attention(Settings):
    """A kind of attention: a table of parameters, and a function of arrays.

    The layers of linen and nnx inherit from it. They make the parameters that `table` lists, and
    call `compute` with them. Another kind of attention overrides both.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse attributes that `__init__` would replace by the values of fields."""
        inherited = {x for base in cls.__mro__ for x in getattr(base, "__dataclass_fields__", ())}
        for name in vars(cls).keys() & inherited - vars(cls).get("__annotations__", {}).keys():
            raise hidden_field(cls, name)
        super().__init_subclass__(**kwargs)

    if not TYPE_CHECKING:  # Type checkers and editors show the fields.

        def __new__(cls, *args: Any, **fields: Any) -> Self:
            """Refuse earlier names of fields, and values that only Flax's layers take."""
            check_given(cls.__name__, fields)
            return super().__new__(cls)

        __signature__ = InitSignature()

    @property
    def mixes_heads(self) -> bool:
        """True if a head's output depends on other heads, so that none can be removed alone."""
        return False

    def check_fields(self: Any) -> None:
        """Check the fields as far as it needs no inputs."""
        checks.fields(self)
        if self.rotary is not None:
            remedy = "give positions.Rotary(), with its parentheses"
            checks.function("rotary", self.rotary, "(x, positions) -> x", remedy, 2)
        _ = self.captures  # Raises an error if it is wrong.
        cache = as_cache_config(self.cache)
        if self.decode or not isinstance(self, nn.Module):  # In nnx a call may decode.
            cache.window(self.mask)

    def checked_table(self, D: int, Dk: int, Dv: int) -> Table:
        """Return `table`, checking fields and building it once for equal fields and sizes.

        Linen clones a layer for each call. Fields that can't be hashed, such as masks with arrays,
        are checked in each.
        """
        cls: Any = type(self)
        names = (field.name for field in dataclasses.fields(self))
        fields = [getattr(self, name) for name in names if name not in ("parent", "name")]
        try:
            tables = _tables(cls, D, Dk, Dv, *fields)
        except TypeError:
            tables = []
        if not tables:
            self.check_fields()
            tables.append(self.table(D, Dk, Dv))
        return tables[0]

    # Not public, or `nnx.tabulate` would take it for a call.
    def _make_call(
        self, options: Mapping[str, Any], scores: tuple[ScoreMod, ...],
        dropout_rng: jax.Array | None, points: Points, is_captured: bool, return_weights: bool,
    ) -> Call:  # fmt: skip
        """Return the arguments of a call as one value.

        `scores` are the layer's, with their parameters, `points` have the module's path and edits,
        and `is_captured` is True if intermediates are collected.
        """
        sow_weights = checks.flag("sow_weights", options.get("sow_weights", False))
        reads, is_custom = asked(self, self.captures), self.custom_attention is not None
        if sow_weights and not is_custom:  # Such a function sows them by itself.
            names = dict.fromkeys((*(reads.what if reads else ()), "weights"))
            reads = dataclasses.replace(reads or Capture(()), what=tuple(names))
        points.reads = reads if is_captured or is_custom else None
        if (reads or sow_weights) and not is_captured and isinstance(self, nn.Module):
            points.warn_if_lost()
        named = {name: options[name] for name in _OF_CALL if name in options}
        named |= {
            "scores": scores + as_scores(options.get("scores", ())), "dropout_rng": dropout_rng,
            "return_weights": return_weights, "points": points,
            "sower": self if sow_weights else None,
        }  # fmt: skip
        return Call(**named)

    def sizes(self: Any, features: int) -> tuple[int, int, int, int]:
        """Return N, K, H and Hv, for inputs_q with `features` features."""
        return shapes.head_sizes(
            features, self.num_heads, self.num_kv_heads, self.qkv_features, self.head_dim,
            self.v_head_dim,
        )  # fmt: skip

    def table(self: Any, D: int, Dk: int, Dv: int) -> Table:
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
            entries["query_ln"] = NormEntry(H, norm)
        if norm is not None and Dk:
            entries["key_ln"] = NormEntry(H, norm)
        if self.gate is not None:
            gate = checks.choice("gate", self.gate, {"head": (N, 1), "feature": (N, Hv)})
            entries["output_gate"] = self.to_heads("output_gate", D, gate)
        return entries | self.out_table(N, Hv, D) | self.score_table(H)

    def to_heads(
        self: Any, name: str, features: int, heads: shapes.Shape, axis: str = "heads"
    ) -> LinearEntry:
        """Return the entry of a projection [D] to heads [N, H]."""
        names = ("embed", axis, "head_dim")
        return LinearEntry((features,), heads, names, has_bias(self.use_bias, name))

    def out_table(self: Any, N: int, Hv: int, D: int) -> Table:
        """Return the table of the output projection from heads [N, Hv]."""
        checks.optional(out_features=self.out_features)
        if not self.project_out:
            return {}
        features, names = (self.out_features or D,), ("heads", "head_dim", "embed")
        biased = has_bias(self.use_bias, "out")
        rows = ("batch", "norm_length")
        return {"out": LinearEntry((N, Hv), features, names, biased, rows, is_out=True)}

    def score_table(self: Any, H: int) -> Table:
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
        call: Call, cache: core.Source,
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
        heads = core.project_heads(p, self, x_q, x_k, x_v, call, cache)
        return core.attend(p, self, heads, call, cache)


@functools.lru_cache(maxsize=256, typed=True)
def _tables(*key: Any) -> list[Table]:
    """Return a list to keep a table in: the same list for equal arguments."""
    return []
