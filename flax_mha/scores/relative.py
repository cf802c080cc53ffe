"""Score functions of the distance between query and key."""

import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import Array, At
from flax_mha.base.frequencies import Frequencies
from flax_mha.base.shapes import Dims
from flax_mha.scores.score_mod import Make, ScoreMod, Vectors


class RelativeBias(ScoreMod):
    """T5's relative position bias, score + table[head, bucket(j − i)].

    Attributes:
      table: [N, buckets] (default: a parameter `relative_bias` of the layer or stack with this in
        its field `scores`).
      bidirectional: True for separate buckets before and after the query. Otherwise, keys after
        the query share the bucket of distance 0.
      max_distance: from this distance on, keys share the last bucket.
      buckets: the buckets of a created table.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning", 2020.
    """

    table: Any = None
    bidirectional: bool = struct.field(pytree_node=False, default=True)
    max_distance: int = struct.field(pytree_node=False, default=128)
    buckets: int = struct.field(pytree_node=False, default=32)

    def learned(self, num_heads: int, head_dim: int, make: Make) -> Self:
        if self.table is not None:
            return self
        shape, names = (num_heads, self.buckets), ("heads", None)
        return self.replace(table=make("relative_bias", shape, names))

    def bind(self, dims: Dims) -> Self:
        table = jnp.asarray(checks.floating("RelativeBias.table", self.table))
        if table.ndim != 2 or table.shape[0] != dims.N or table.shape[1] < 4:
            raise ValueError(
                f"RelativeBias.table must have shape [N, buckets] with N={dims.N} and at least 4 "
                f"buckets, got {table.shape}; give a row for each query head"
            )
        return self.replace(table=table)

    def __call__(self, score: jax.Array, at: At) -> jax.Array:
        bucket = relative_bucket(
            at.k - at.q, self.table.shape[1], self.bidirectional, self.max_distance
        )
        table = self.table.astype(score.dtype)
        if at.head.size == 1:
            row = jax.lax.dynamic_index_in_dim(table, at.head.reshape(()), keepdims=False)
            return score + jnp.take(row, bucket)
        return score + jnp.take(table.reshape(-1), at.head * table.shape[1] + bucket)


class Relative(ScoreMod):
    """Relative positions as keys, score + scale·q_i·r[d], with d = j − i clipped to ±L.

    Attributes:
      table: r, [2·L + 1, H], from distance −L on (default: a parameter `relative_keys`).
      max_distance: L of a created table.

    Source: Shaw et al., "Self-Attention with Relative Position Representations", 2018, equation 5.
    """

    table: Any = None
    max_distance: int = struct.field(pytree_node=False, default=16)
    vectors = True

    def learned(self, num_heads: int, head_dim: int, make: Make) -> Self:
        if self.table is not None:
            return self
        shape = (2 * self.max_distance + 1, head_dim)
        return self.replace(table=make("relative_keys", shape, (None, None)))

    def bind(self, dims: Dims) -> Self:
        table = jnp.asarray(checks.floating("Relative.table", self.table))
        if table.shape[1:] != (dims.H,) or len(table) % 2 == 0:
            raise ValueError(
                f"Relative.table must have shape [2·L + 1, H] with H={dims.H}, got {table.shape}; "
                f"the middle row is for distance 0"
            )
        return self.replace(table=table)

    def of_vectors(self, score: jax.Array, at: At, q: jax.Array, k: jax.Array) -> jax.Array:
        table = shapes.lead(self.table.astype(score.dtype), score.ndim)
        by_distance = jnp.einsum("...th,...rh->...tr", q, table)
        limit = table.shape[-2] // 2
        distance = jnp.clip(at.k - at.q, -limit, limit) + limit
        return score + jnp.take_along_axis(by_distance, distance, -1, mode="promise_in_bounds")


class TransformerXL(ScoreMod):
    """Transformer-XL's relative positions: projected sinusoids as keys, and two biases.

        score + q_i·r_d·scale + (u·k_j + v·r_d) / √H,   r_d = W [sin(d·w), cos(d·w)],   d = i − j

    with w = 10,000^(−2c/D) for c = 0 … D/2 − 1, and u, v and W for each head. A layer or a stack
    with this in its field `scores` creates arrays that are None, such as `relative_kernel`.

    Attributes:
      content_bias: u, [N, H].
      position_bias: v, [N, H].
      kernel: W, [D, N, H].
      features: D of a created W (default: N·H).

    Source: Dai et al., "Transformer-XL", 2019, section 3.3, with a scale of 1/√H.
    """

    content_bias: Any = None
    position_bias: Any = None
    kernel: Any = None
    features: int | None = struct.field(pytree_node=False, default=None)
    vectors = True

    def learned(self, num_heads: int, head_dim: int, make: Make) -> Self:
        heads, names = (num_heads, head_dim), ("heads", None)
        features = self.features or num_heads * head_dim
        init = jax.nn.initializers.glorot_uniform(0, (1, 2))
        missing: dict[str, Any] = {
            "content_bias": (heads, names),
            "position_bias": (heads, names),
            "kernel": ((features, *heads), (None, *names), init),
        }
        params = {
            name: make(f"relative_{name}", *parameter)
            for name, parameter in missing.items()
            if getattr(self, name) is None
        }
        return self.replace(**params)

    def bind(self, dims: Dims) -> Self:
        u, v, kernel = (
            jnp.asarray(checks.floating("TransformerXL's array", x))
            for x in (self.content_bias, self.position_bias, self.kernel)
        )
        heads = (dims.N, dims.H)
        if not u.shape == v.shape == kernel.shape[1:] == heads or len(kernel) % 2:
            raise ValueError(
                f"TransformerXL's arrays must have shapes [N, H], [N, H] and [D, N, H] with (N, H) "
                f"= {heads} and an even D, got {u.shape}, {v.shape} and {kernel.shape}; the field "
                f"features sets the D of a created kernel"
            )
        return self.replace(content_bias=u, position_bias=v, kernel=jnp.moveaxis(kernel, 1, 0))

    def of_vectors(self, score: jax.Array, at: At, q: jax.Array, k: jax.Array) -> jax.Array:
        # sin(d·w) = sin(i·w)·cos(j·w) − cos(i·w)·sin(j·w) saves r_d of all pairs.
        head = jnp.asarray(at.head)[..., 0, 0]
        u, v, kernel = (
            jnp.take(x.astype(score.dtype), head, axis=0, mode="clip")
            for x in (self.content_bias, self.position_bias, self.kernel)
        )
        scale = q.shape[-1] ** -0.5
        content = jnp.einsum("...h,...sh->...s", scale * u, k)[..., None, :]
        q = jnp.einsum("...th,...dh->...td", q + scale * v[..., None, :], kernel)
        sin_part, cos_part = jnp.split(q, 2, -1)
        # Count from the first query: angles near 0 are the most exact.
        first = at.q[..., :1, :]
        (sin_i, cos_i), (sin_j, cos_j) = (
            _waves(x - first, kernel.shape[-2], score.dtype)
            for x in (at.q, jnp.swapaxes(at.k, -1, -2))
        )
        q = jnp.concatenate(
            [sin_part * sin_i + cos_part * cos_i, cos_part * sin_i - sin_part * cos_i], -1
        )
        waves = jnp.concatenate([cos_j, sin_j], -1)
        return score + content + jnp.einsum("...td,...sd->...ts", q, waves)


def _waves(positions: Array, features: int, dtype: jnp.dtype) -> Vectors:
    """Return the sines and cosines [..., T, D/2] of positions [..., T, 1]."""
    theta = 10_000.0 ** (-2 * np.arange(features // 2) / features)
    at = jnp.asarray(positions)[..., 0]
    at = at.astype(dtype) if dtype == jnp.float64 else at
    angles = Frequencies.of(theta, dtype).angles(at)
    return jnp.sin(angles), jnp.cos(angles)


def relative_bucket(
    distance: Array, buckets: int, bidirectional: bool = True, max_distance: int = 128
) -> jax.Array:
    """Return T5's buckets, int32, of distances j − i.

    Args:
      distance: j − i, integers of any shape.
      buckets: the number of buckets.
      bidirectional: True for separate buckets before and after the query.
      max_distance: from this distance on, keys share the last bucket.
    """
    distance = jnp.asarray(distance)
    first = jnp.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        first = jnp.where(distance > 0, buckets, 0)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    exact = buckets // 2
    if max_distance <= exact:
        raise ValueError(
            f"max_distance must exceed {exact}, the exact distances on a side, got {max_distance}; "
            f"raise it, or give a table of fewer buckets"
        )
    # Compare integers: a float32 logarithm puts some boundaries one bucket too low.
    count, growth = buckets - exact, max_distance / exact
    starts = [math.ceil(round(exact * growth ** (m / count), 9)) for m in range(1, count)]
    return sum(((distance >= start).astype(jnp.int32) for start in starts), first) + jnp.minimum(
        distance, exact
    )
