"""Scores by how far a key stands from its query."""

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha import inputs
from flax_mha.grid import Array, At
from flax_mha.scores.base import Make, ScoreMod
from flax_mha.shapes import Dims


class RelativeBias(ScoreMod):
    """score + table[head, bucket(j − i)], the relative position bias of T5.

    Half of the buckets are exact distances; the others grow logarithmically up to max_distance.

    >>> encoder = Encoder(6, block, scores=(RelativeBias(),))  # one table for all layers, as T5 has

    Attributes:
      table: [N, buckets]; None in the field `scores` of a layer or a stack, whose parameter
        `relative_bias` it then is.
      bidirectional: whether keys before and after the query have buckets of their own; if not,
        keys after it share that of distance 0.
      max_distance: from which all distances share the last bucket.
      buckets: of a table that is to be made.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning", 2020.
    """

    table: Any = None
    bidirectional: bool = struct.field(pytree_node=False, default=True)
    max_distance: int = struct.field(pytree_node=False, default=128)
    buckets: int = struct.field(pytree_node=False, default=32)

    def learned(self, num_heads: int, make: Make) -> Self:
        """See `ScoreMod.learned`."""
        if self.table is not None:
            return self
        inputs.positive(**{"RelativeBias.buckets": self.buckets})
        return self.replace(table=make("relative_bias", (num_heads, self.buckets)))

    def bind(self, dims: Dims) -> Self:
        """See `ScoreMod.bind`."""
        if self.table is None:
            raise ValueError(
                "RelativeBias must have a table [N, buckets] here, got None; give one, or give it "
                "in the field scores= of a layer or a stack, which learns one"
            )
        table = jnp.asarray(inputs.floating("RelativeBias.table", self.table))
        inputs.flag("RelativeBias.bidirectional", self.bidirectional)
        if table.ndim != 2 or table.shape[0] != dims.N or table.shape[1] < 4:
            raise ValueError(
                f"RelativeBias.table must have shape [N, buckets] with N={dims.N} and at least 4 "
                f"buckets, got {table.shape}"
            )
        _check_distance(table.shape[1], self.bidirectional, self.max_distance)
        return self.replace(table=table)

    def __call__(self, score: jax.Array, at: At) -> jax.Array:
        """See `ScoreMod.__call__`."""
        bucket = relative_bucket(
            at.k - at.q, self.table.shape[1], self.bidirectional, self.max_distance
        )
        table = self.table.astype(score.dtype)
        if at.head.size == 1:
            row = jax.lax.dynamic_index_in_dim(table, at.head.reshape(()), keepdims=False)
            return score + jnp.take(row, bucket)
        return score + jnp.take(table.reshape(-1), at.head * table.shape[1] + bucket)


def relative_bucket(
    distance: Array, buckets: int, bidirectional: bool = True, max_distance: int = 128
) -> jax.Array:
    """The bucket, int32, of each distance j − i; see `RelativeBias`."""
    _check_distance(buckets, bidirectional, max_distance)
    first = jnp.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        first = jnp.where(distance > 0, buckets, 0)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    exact = buckets // 2
    # The argument stays above 0: the branch not taken must be finite too.
    far = jnp.maximum(distance, exact).astype(jnp.float32) / exact
    steps = jnp.log(far) / np.log(max_distance / exact) * (buckets - exact)
    far_bucket = jnp.minimum(exact + steps.astype(jnp.int32), buckets - 1)
    return first + jnp.where(distance < exact, distance, far_bucket)


def _check_distance(buckets: int, bidirectional: bool, max_distance: int) -> None:
    """Buckets that grow up to max_distance need room after the exact ones."""
    exact = (buckets // 2 if bidirectional else buckets) // 2
    inputs.positive(max_distance=max_distance)
    if max_distance <= exact:
        raise ValueError(
            f"max_distance must exceed {exact}, the distances with a bucket of their own out of "
            f"{buckets} buckets, got {max_distance}; raise it, or give a table of fewer buckets"
        )
