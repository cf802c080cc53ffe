"""From a layer's inputs to queries, keys and values of its heads: projections, norms, rotary."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha.base import checks
from flax_mha.base.coordinates import Array
from flax_mha.cache import Extended, KVCache
from flax_mha.layer.linear import Linear, fused
from flax_mha.positions import Axial, Rotation

Norm: TypeAlias = Callable[[jax.Array], jax.Array]


class Weights(struct.PyTreeNode):
    """The parameters of a layer, as functions where a submodule is called.

    Attributes:
      query: to [N, H].
      key: to [K, H]; None where no keys are projected.
      value: to [K, Hv]; likewise.
      out: from [N, Hv] to [D_out]; None if there is no output projection.
      query_norm: the norm of queries [*B, T, N, H]; or None.
      key_norm: the norm of keys; or None.
      sinks: [N], a score more for each head; or None.
      gate: to [N, 1] or [N, Hv], whose sigmoid scales the heads' outputs; or None.
      scale: [N], of each head's scores; or None.
      beside: more projections of inputs_q, each to [N, ·]; `project` returns their products last.
    """

    query: Linear
    key: Linear | None
    value: Linear | None
    out: Linear | None
    query_norm: Norm | None = struct.field(pytree_node=False, default=None)
    key_norm: Norm | None = struct.field(pytree_node=False, default=None)
    sinks: jax.Array | None = None
    gate: Linear | None = None
    scale: jax.Array | None = None
    beside: tuple[Linear, ...] = ()


def project(
    weights: Weights, x_q: jax.Array, x_k: jax.Array | None, x_v: jax.Array | None
) -> tuple[jax.Array, Any, Any, jax.Array | None, tuple[jax.Array, ...]]:
    """Return queries [*B, T, N, H], keys [*B, S, K, H], values [*B, S, K, Hv], gates, and `beside`.

    Of no x_k there are no keys and values; of one input as few products as the mesh allows.
    """
    query, key, value = weights.query, weights.key, weights.value
    of_q = [query, *weights.beside, *([] if weights.gate is None else [weights.gate])]
    k: jax.Array | None = None
    v: jax.Array | None = None
    if key is None or value is None or x_k is None or x_v is None:
        found = fused(x_q, of_q)
    elif x_q is x_k is x_v:
        *found, k, v = fused(x_q, (*of_q, key, value))
    else:
        found = fused(x_q, of_q)
        k, v = fused(x_k, (key, value)) if x_k is x_v else (key(x_k), value(x_v))
    gate = None if weights.gate is None else found.pop()
    q, *beside = found
    return q, k, v, gate, tuple(beside)


def normed(weights: Weights, q: jax.Array, k: Any) -> tuple[jax.Array, Any]:
    """Return queries, and keys if there are some, after their norms."""
    if weights.query_norm is not None:
        q = weights.query_norm(q)
    if weights.key_norm is not None and k is not None:
        k = weights.key_norm(k)
    return q, k


def turned(
    rotary: Rotation | None, q: jax.Array, k: jax.Array | None,
    positions: jax.Array | tuple[jax.Array, jax.Array] | None, order: Array | None, cache: Any,
) -> tuple[jax.Array, Any]:  # fmt: skip
    """Queries and keys, turned by where their tokens stand."""
    q_pos, k_pos = (jnp.arange(x.shape[-3]) for x in (q, q if k is None else k))
    if order is not None:
        q_pos = k_pos = jnp.asarray(order)
    if isinstance(cache, KVCache):
        q_pos = k_pos = cache.next_positions(q.shape[-3])
    if isinstance(cache, Extended):
        q_pos = cache.q_positions
    return rotate(rotary, q, k, positions, q_pos, k_pos)


def rotate(
    rotation: Rotation | None,
    q: jax.Array,
    k: jax.Array | None,
    positions: jax.Array | tuple[jax.Array, jax.Array] | None,
    q_pos: jax.Array,
    k_pos: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """Turns queries and keys by the positions given (both, or a pair), or else by q_pos and k_pos.

    No keys (None) stand for those that a cache holds, turned already.

    Raises:
      ValueError: if positions are given and there is no rotation, or a lattice has too few places.
    """
    if rotation is None:
        if positions is not None:
            raise ValueError(
                "positions say where `rotary` turns queries and keys, and rotary is None; "
                "set it to positions.Rotary(), or drop positions"
            )
        return q, k
    if positions is None and isinstance(rotation, Axial):
        # Inside `jit` q_pos and k_pos are traced, but T tokens need T places wherever they start.
        for x in (q, k):
            rotation.check(np.arange(0 if x is None else x.shape[-3]))
    if isinstance(positions, tuple) and len(positions) == 2:
        q_pos, k_pos = positions
    elif positions is not None:
        k_pos = positions if q_pos.shape[-1] == k_pos.shape[-1] else k_pos
        q_pos = positions
    return _turned(rotation, q, q_pos), None if k is None else _turned(rotation, k, k_pos)


def _turned(rotation: Rotation, x: jax.Array, positions: jax.Array) -> jax.Array:
    """What a rotation, perhaps a user's own, makes of queries or keys."""
    y = rotation(x, positions)
    if getattr(y, "shape", None) != x.shape:
        raise ValueError(
            f"rotary must keep the shape of queries and keys, {x.shape}, got {checks.describe(y)}; "
            f"return what it has turned"
        )
    return checks.floating("what rotary gives", y)
