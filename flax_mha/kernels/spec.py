"""What one attention call computes, in one value that every kernel reads."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from flax_mha import sharding
from flax_mha.base.coordinates import Array, At, ScoreArray, whole
from flax_mha.base.shapes import Dims
from flax_mha.base.trees import tree_nodes
from flax_mha.kernels.dropout import WeightDropout
from flax_mha.kernels.loops import select
from flax_mha.kernels.normalizers import SOFTMAX
from flax_mha.masks import Mask, Predicate
from flax_mha.masks.base import evaluate
from flax_mha.scores import Score, ScoreMod, Vectors, changed

# An output [*B, T, N, Hv] and its lse [*B, N, T].
Result = tuple[jax.Array, jax.Array]
# A call made ready by a kernel: computes its result. Some kernels take a result that is known, and
# compute only its gradients.
Lowered = Callable[..., Result]


class Refusal(NamedTuple):
    """The reason why a kernel can't run a call."""

    reason: str


class Platform(NamedTuple):
    """The devices that a call will run on.

    Attributes:
      name: JAX's name of the platform: "cpu", "gpu" or "tpu".
      device: what JAX calls the kind of device, such as "NVIDIA H200".
      cudnn: the version of cuDNN, such as (9, 20, 0); None for the one that is installed.
      not_partitionable: why a kernel that XLA can't divide between devices must not run; None
        where there is one device, or each runs its own shard.
      auto_partitioned: whether XLA divides the call between several devices as it likes: no mesh
        says how.
    """

    name: str
    device: str = ""
    cudnn: tuple[int, int, int] | None = None
    not_partitionable: str | None = None
    auto_partitioned: bool = False


class AttentionSpec(struct.PyTreeNode):
    """Everything about a call but q, k and v. Its arrays have been checked against them.

    Attributes:
      mask: a bound mask, or None to see everything.
      scores: bound, applied in order.
      sinks: [N], one more score a head, that takes weight and gives nothing; or None.
      dropout: of the weights.
      q_pos: positions of the queries, int32 [*B|1, 1, T, 1]; None for 0 … T−1.
      k_pos: positions of the keys, int32 [*B|1, 1, 1, S]; None for 0 … S−1.
      row_ids: indices of the batch rows, int32 [*B, 1, 1, 1]; None for 0, 1, … They are given on a
        shard of a call, whose rows and heads are some of many.
      head_ids: indices of the query heads, int32 [1, N, 1, 1], likewise.
      scale: of q·kᵀ.
      invalid: queries whose mask has other numbers than 1 and 0, bool [*B|1, N|1, T|1, 1]; or
        None. Their q is NaN; no kernel reads this, see `nan_where_invalid`.
      precision: of the matrix products, see `jax.lax.Precision`.
      reads_lse: whether anyone reads the lse; if not, a kernel may give 0 in its place.
      exact_lse: whether it is the caller who reads it, and wants it exact.
      normalizer: how scores become weights, see `normalizers`.
    """

    mask: Mask | None
    scores: tuple[ScoreMod, ...]
    sinks: jax.Array | None
    dropout: WeightDropout | None
    q_pos: ScoreArray | None
    k_pos: ScoreArray | None
    scale: float | Array
    row_ids: ScoreArray | None = None
    head_ids: ScoreArray | None = None
    invalid: Array | None = None
    precision: jax.lax.PrecisionLike = struct.field(pytree_node=False, default=None)
    reads_lse: bool = struct.field(pytree_node=False, default=True)
    exact_lse: bool = struct.field(pytree_node=False, default=False)
    normalizer: str = struct.field(pytree_node=False, default=SOFTMAX)

    def at(self, dims: Dims) -> At:
        """Where all scores of the call stand."""
        arrays = {"row": self.row_ids, "head": self.head_ids, "q": self.q_pos, "k": self.k_pos}
        known = {name: x.array for name, x in arrays.items() if x is not None}
        return whole(dims)._replace(**known)

    @property
    def vectors(self) -> bool:
        """Whether any of the scores sees the vectors of queries and keys."""
        return any(mod.vectors for mod in self.scores)

    def user_types(self) -> list[type]:
        """Return the types of masks and scores that compute what a user wrote."""
        parts = (x for x in tree_nodes((self.mask, self.scores)) if isinstance(x, Mask | ScoreMod))
        return [type(x) for x in parts if _is_of_user(type(x))]

    def apply(
        self, score: jax.Array, at: At, forbidden: float = -jnp.inf, vectors: Vectors | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Applies the scores in order, then the mask, with that number where it forbids.

        Args:
          score: from q·kᵀ·scale.
          at: where it stands.
          forbidden: see above.
          vectors: those it is of, if any of the scores sees them; finite where there is a mask.

        Returns:
          The scores, and where the mask allows; None for everywhere.
        """
        allowed = None if self.mask is None else jnp.asarray(evaluate(self.mask, at))
        if allowed is not None and self.scores:
            # A derivative of NaN times 0 is NaN: what is masked must not enter the functions.
            score = jnp.where(allowed, score, 0.0)
        with _precise(self.precision if vectors else None):
            for mod in self.scores:
                score = changed(mod, score, at, vectors)
        return score if allowed is None else select(allowed, score, forbidden), allowed

    def nan_where_invalid(self, out: jax.Array) -> jax.Array:
        """Make outputs [*B, T, N, ·] of invalid queries NaN: an empty row would hide it."""
        if self.invalid is None:
            return out
        return nan_where(jnp.swapaxes(jnp.asarray(self.invalid), -3, -2), out)

    def nan_lse_where_invalid(self, lse: jax.Array) -> jax.Array:
        """Make the lse [*B, N, T] of invalid queries NaN."""
        return lse if self.invalid is None else nan_where(jnp.asarray(self.invalid)[..., 0], lse)

    def apply_dropout(self, weights: jax.Array, at: At) -> jax.Array:
        """Set dropped weights at those coordinates to 0; `scale_kept` is for the others' products.

        Multiplied by it themselves they would be rounded once more in half precision, and their
        gradients, which have no such rounding, would not cancel against those of their sum.
        """
        if self.dropout is None:
            return weights
        return jnp.where(self.dropout.keep(*at), weights, jnp.zeros_like(weights))

    def scale_kept(self, x: jax.Array) -> jax.Array:
        """Scale a product with weights that dropout has kept, to keep its expectation."""
        return x if self.dropout is None else x * self.dropout.scale


def _precise(precision: Any) -> contextlib.AbstractContextManager:
    """In which products are of that precision, if they don't say otherwise."""
    one = precision[0] if isinstance(precision, tuple) else precision
    if one is None:
        return contextlib.nullcontext()
    name: Any = getattr(one, "name", one)
    # JAX knows these in small letters here.
    small = name in jax.lax.Precision.__members__
    return jax.default_matmul_precision(name.lower() if small else name)


def nan_where(invalid: jax.Array, x: jax.Array) -> jax.Array:
    """Make x NaN there, and gradients through it."""
    factor = jnp.where(invalid, jnp.nan, 1.0).astype(x.dtype)
    return x * sharding.like(jnp.broadcast_to(factor, x.shape), x)


def _is_of_user(cls: type) -> bool:
    """Return True if a mask or score computes what a user wrote."""
    return cls in (Predicate, Score) or cls.__module__.partition(".")[0] != "flax_mha"
