"""What one attention call computes, in one value that every kernel reads."""

import math

import jax
import jax.numpy as jnp
from flax import struct

from flax_mha import shapes
from flax_mha.kernels.dropout import Dropout
from flax_mha.masks import Mask
from flax_mha.shapes import Dims


class AttentionSpec(struct.PyTreeNode):
    """Everything about a call but q, k and v. Its arrays have been checked against them.

    Attributes:
      mask: a bound mask, or None to see everything.
      bias: added to the scores, [*B|1, N|1, T|1, S|1].
      dropout: of the weights.
      q_pos: positions of the queries, int [*B|1, 1, T, 1].
      k_pos: positions of the keys, int [*B|1, 1, 1, S].
      scale: of q·kᵀ.
      precision: of the matrix products, see `jax.lax.Precision`.
    """

    mask: Mask | None
    bias: jax.Array | None
    dropout: Dropout | None
    q_pos: jax.Array
    k_pos: jax.Array
    scale: float | jax.Array
    precision: jax.lax.PrecisionLike = struct.field(pytree_node=False, default=None)

    def allowed(self) -> jax.Array | None:
        """Bool, broadcastable to [*B, N, T, S]; None where everything is."""
        return None if self.mask is None else self.mask.allowed(self.q_pos, self.k_pos)

    def drop(self, weights: jax.Array) -> jax.Array:
        """Applies dropout to weights [*B, N, T, S]."""
        if self.dropout is None:
            return weights
        *B, N, _, _ = weights.shape
        row = jnp.arange(math.prod(B)).reshape(*B, 1, 1, 1)
        head = shapes.lead(jnp.arange(N)[:, None, None], weights.ndim)
        return self.dropout(weights, row, head, self.q_pos, self.k_pos)


def place_queries(positions: jax.Array | None, dims: Dims) -> jax.Array:
    """Positions [T] or [*B, T] (default 0 … T−1) as [*B|1, 1, T, 1]."""
    positions = _positions("q_positions", positions, dims.T, dims)
    return jnp.expand_dims(positions, (-3, -1))


def place_keys(positions: jax.Array | None, dims: Dims) -> jax.Array:
    """Positions [S] or [*B, S] (default 0 … S−1) as [*B|1, 1, 1, S]."""
    positions = _positions("kv_positions", positions, dims.S, dims)
    return jnp.expand_dims(positions, (-3, -2))


def _positions(name: str, positions: jax.Array | None, length: int, dims: Dims) -> jax.Array:
    if positions is None:
        positions = jnp.arange(length, dtype=jnp.int32)
    positions = jnp.asarray(positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {positions.dtype}; cast with .astype(int)")
    if positions.shape not in ((length,), (*dims.B, length)):
        raise ValueError(
            f"{name} must have shape {(length,)} or [*B, ·] = {(*dims.B, length)}, "
            f"got {positions.shape}; give one position for each token"
        )
    return shapes.lead(positions, len(dims.B) + 1)
