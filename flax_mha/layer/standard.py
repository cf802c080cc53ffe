"""Multi-head attention: its table of parameters, and what it computes, for linen and nnx alike."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax

from flax_mha.base import checks, shapes
from flax_mha.layer import core
from flax_mha.layer.parameters import ArrayEntry, LinearEntry, NormEntry, Table
from flax_mha.layer.qk_norm import as_qk_norm
from flax_mha.layer.settings import ZEROS, Call, Fields, gate_features, has_bias, learns_scale

# One function for equal values, so that the definitions of equal layers of nnx are equal.
_constant = functools.cache(nn.initializers.constant)


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Attention(Fields):
    """A kind of attention: fields, a table of parameters, and a function of arrays.

    The layers of both libraries inherit from it. They make the parameters by going through `table`,
    and call `compute` with them; another kind defines both anew.
    """

    def sizes(self: Any, features: int) -> tuple[int, int, int, int]:
        """Return N, K, H and Hv, for inputs_q of so many features."""
        return shapes.head_sizes(
            features, self.num_heads, self.num_kv_heads, self.qkv_features, self.head_dim,
            self.v_head_dim,
        )  # fmt: skip

    def table(self: Any, D: int, Dk: int, Dv: int) -> Table:
        """Return the parameters, in the order in which they are drawn.

        Args:
          D: features of inputs_q.
          Dk: of inputs_k; 0 where no keys are projected.
          Dv: of inputs_v, likewise.
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
        if gate := gate_features(self.gate, N, Hv):
            entries["output_gate"] = self.to_heads("output_gate", D, gate)
        return entries | self.out_table(N, Hv, D) | self.score_table(H)

    def to_heads(
        self: Any, name: str, features: int, heads: shapes.Shape, axis: str = "heads"
    ) -> LinearEntry:
        """Return the entry of a projection [D] to [N, H], whose axis of heads has that name."""
        names = ("embed", axis, "head_dim")
        return LinearEntry((features,), heads, names, has_bias(self.use_bias, name))

    def out_table(self: Any, N: int, Hv: int, D: int) -> Table:
        """Return the output projection from heads [N, Hv], if there is one."""
        checks.optional(out_features=self.out_features)
        if not self.project_out:
            return {}
        features, names = (self.out_features or D,), ("heads", "head_dim", "embed")
        biased = has_bias(self.use_bias, "out")
        rows = ("batch", "norm_length")
        return {"out": LinearEntry((N, Hv), features, names, biased, rows, is_out=True)}

    def score_table(self: Any, H: int) -> Table:
        """Return sinks and scales of the scores, if they are learned."""
        entries: Table = {}
        if self.sinks:
            entries["sinks"] = ArrayEntry((self.num_heads,), ("heads",), ZEROS, is_random=False)
        if learns_scale(self.scale):
            init = _constant(H**-0.5)
            entries["score_scale"] = ArrayEntry(
                (self.num_heads,), ("heads",), init, is_random=False
            )
        return entries

    def compute(
        self, p: Mapping[str, Any], x_q: jax.Array, x_k: jax.Array | None, x_v: jax.Array | None,
        call: Call, cache: core.Source,
    ) -> core.Output:  # fmt: skip
        """Return the layer's output for those inputs: what another kind defines anew.

        Args:
          p: the parameters by name: `Linear`, norms as functions, arrays.
          x_q: [*B, T, D].
          x_k: [*B, S, D'], or None, to attend to what the cache holds.
          x_v: [*B, S, D''], likewise.
          call: the other arguments.
          cache: of earlier calls, or the keys and values of another layer, or the `CacheConfig` of
            a cache that is to be made.
        """
        heads = core.project_heads(p, self, x_q, x_k, x_v, call, cache)
        return core.attend(p, self, heads, call, cache)
