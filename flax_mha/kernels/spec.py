"""What one attention call computes, in one value that every kernel reads."""

import jax
import jax.numpy as jnp
from flax import struct

from flax_mha.grid import At, Grid, whole
from flax_mha.kernels.dropout import Dropout
from flax_mha.masks import Mask
from flax_mha.scores import ScoreMod
from flax_mha.shapes import Dims


class AttentionSpec(struct.PyTreeNode):
    """Everything about a call but q, k and v. Its arrays have been checked against them.

    Attributes:
      mask: a bound mask, or None to see everything.
      scores: bound, applied in order.
      sinks: [N], one more score a head, that takes weight and gives nothing; or None.
      dropout: of the weights.
      q_pos: positions of the queries, int32 [*B|1, 1, T, 1]; None for 0 … T−1.
      k_pos: positions of the keys, int32 [*B|1, 1, 1, S]; None for 0 … S−1.
      rows: indices of the batch rows, int32 [*B, 1, 1, 1]; None for 0, 1, … Given on a shard of a
        call, whose rows and heads are some of many.
      heads: indices of the query heads, int32 [1, N, 1, 1], likewise.
      scale: of q·kᵀ.
      precision: of the matrix products, see `jax.lax.Precision`.
    """

    mask: Mask | None
    scores: tuple[ScoreMod, ...]
    sinks: jax.Array | None
    dropout: Dropout | None
    q_pos: Grid | None
    k_pos: Grid | None
    scale: float | jax.Array
    rows: Grid | None = None
    heads: Grid | None = None
    precision: jax.lax.PrecisionLike = struct.field(pytree_node=False, default=None)

    def at(self, dims: Dims) -> At:
        """The place of all scores of the call."""
        given = {"row": self.rows, "head": self.heads, "q": self.q_pos, "k": self.k_pos}
        arrays = {name: grid.array for name, grid in given.items() if grid is not None}
        return whole(dims)._replace(**arrays)

    def apply(self, score: jax.Array, at: At) -> jax.Array:
        """Applies the scores in order, then the mask: −∞ where it forbids."""
        allowed = None if self.mask is None else self.mask.allowed(at)
        if allowed is not None and self.scores:
            # A derivative of NaN times 0 is NaN: what is masked must not enter the functions.
            score = jnp.where(allowed, score, 0.0)
        for mod in self.scores:
            score = mod(score, at)
        return score if allowed is None else jnp.where(allowed, score, -jnp.inf)

    def drop(self, weights: jax.Array, at: At) -> jax.Array:
        """Applies dropout to weights at those places."""
        return weights if self.dropout is None else self.dropout(weights, *at)
