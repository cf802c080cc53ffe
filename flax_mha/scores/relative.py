"""Scores by the distance of a key from its query."""

import functools
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import Array, At
from flax_mha.base.shapes import Dims
from flax_mha.scores.base import Make, ScoreMod, Vectors


class RelativeBias(ScoreMod):
    """score + table[head, bucket(j − i)], the relative position bias of T5.

    Half of the buckets are exact distances; the others grow logarithmically up to max_distance.

    >>> encoder = Encoder(6, block, scores=(RelativeBias(),))  # one table for all layers, as T5 has

    Attributes:
      table: [N, buckets]; None in the field `scores` of a layer or a stack, whose parameter
        `relative_bias` it then is.
      bidirectional: True if keys before and after the query have separate buckets; if False, keys
        after it share the bucket of distance 0.
      max_distance: the distance from which all share the last bucket.
      buckets: the number of buckets of a learned table.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning", 2020.
    """

    table: Any = None
    bidirectional: bool = struct.field(pytree_node=False, default=True)
    max_distance: int = struct.field(pytree_node=False, default=128)
    buckets: int = struct.field(pytree_node=False, default=32)

    def learned(self, num_heads: int, head_dim: int, make: Make) -> Self:
        if self.table is not None:
            return self
        checks.positive(**{"RelativeBias.buckets": self.buckets})
        shape, names = (num_heads, self.buckets), ("heads", None)
        return self.replace(table=make("relative_bias", shape, names))

    def bind(self, dims: Dims) -> Self:
        table = _as_floating("RelativeBias", "table", self.table)
        checks.flag("RelativeBias.bidirectional", self.bidirectional)
        if table.ndim != 2 or table.shape[0] != dims.N or table.shape[1] < 4:
            raise ValueError(
                f"RelativeBias.table must have shape [N, buckets] with N={dims.N} and at least 4 "
                f"buckets, got {table.shape}"
            )
        _check_distance(table.shape[1], self.bidirectional, self.max_distance)
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
    """score + scale·q_i·r[d], for d = j − i clipped to ±L: relative positions as keys.

    >>> layer = MultiHeadAttention(8, scores=(Relative(max_distance=16),))

    Attributes:
      table: r, [2·L + 1, H] for all heads or [N, 2·L + 1, H], from distance −L on; None in the
        field `scores` of a layer or a stack, whose parameter `relative_keys` it then is.
      max_distance: L, of a learned table.
      per_head: True if a learned table has an axis of heads.

    Source: Shaw, Uszkoreit and Vaswani, "Self-Attention with Relative Position Representations",
    2018, equation 5; there are none for values.
    """

    table: Any = None
    max_distance: int = struct.field(pytree_node=False, default=16)
    per_head: bool = struct.field(pytree_node=False, default=False)
    vectors = True

    def learned(self, num_heads: int, head_dim: int, make: Make) -> Self:
        if self.table is not None:
            return self
        checks.positive(**{"Relative.max_distance": self.max_distance})
        shape, names = (2 * self.max_distance + 1, head_dim), (None, None)
        if checks.flag("Relative.per_head", self.per_head):
            return self.replace(table=make("relative_keys", (num_heads, *shape), ("heads", *names)))
        return self.replace(table=make("relative_keys", shape, names))

    def bind(self, dims: Dims) -> Self:
        table = _as_floating("Relative", "table", self.table)
        *heads, rows, H = (0, 0, *table.shape)[-max(table.ndim, 2) :]
        if heads not in ([], [dims.N]) or rows % 2 == 0 or H != dims.H:
            raise ValueError(
                f"Relative.table must have shape [2·L + 1, H] or [N, 2·L + 1, H] with N={dims.N} "
                f"and H={dims.H}, got {table.shape}; its middle row is that of distance 0"
            )
        return self.replace(table=table)

    def of_vectors(self, score: jax.Array, at: At, q: jax.Array, k: jax.Array) -> jax.Array:
        table = self.table.astype(score.dtype)
        table = take_heads(table, at) if table.ndim == 3 else shapes.lead(table, score.ndim)
        by_distance = jnp.einsum("...th,...rh->...tr", q, table)
        far = table.shape[-2] // 2
        distance = jnp.clip(at.k - at.q, -far, far) + far
        return score + jnp.take_along_axis(by_distance, distance, -1, mode="promise_in_bounds")


class TransformerXL(ScoreMod):
    """Relative positions as sinusoids that are projected to keys, and biases in place of queries.

        score + q_i·r_d·scale + (u·k_j + v·r_d) / √H,   r_d = W [sin(d·w), cos(d·w)],   d = i − j

    with w = base^(−2c/D), c = 0 … D/2 − 1, and u, v and W of each head.

    >>> decoder = Decoder(6, block, scores=(TransformerXL(features=512),))  # biases of all layers

    Attributes:
      content_bias: u, [N, H]; None, as the other two, in the field `scores` of a layer or a stack,
        whose parameters `relative_content_bias`, `relative_position_bias` and `relative_kernel`
        they then are.
      position_bias: v, [N, H].
      kernel: W, [D, N, H].
      features: D, of a learned W (default: N·H).
      base: of the wavelengths.

    Source: Dai et al., "Transformer-XL", 2019, section 3.3; the call's scale is 1/√H there.
    """

    content_bias: Any = None
    position_bias: Any = None
    kernel: Any = None
    features: int | None = struct.field(pytree_node=False, default=None)
    base: float = struct.field(pytree_node=False, default=10_000.0)
    vectors = True

    def learned(self, num_heads: int, head_dim: int, make: Make) -> Self:
        checks.optional(**{"TransformerXL.features": self.features})
        heads, names = (num_heads, head_dim), ("heads", None)
        features = self.features or num_heads * head_dim
        init = jax.nn.initializers.glorot_uniform(0, (1, 2))
        missing: dict[str, Any] = {
            "content_bias": (heads, names),
            "position_bias": (heads, names),
            "kernel": ((features, *heads), (None, *names), init),
        }
        made = {
            name: make(f"relative_{name}", *parameter)
            for name, parameter in missing.items()
            if getattr(self, name) is None
        }
        return self.replace(**made)

    def bind(self, dims: Dims) -> Self:
        names = ("content_bias", "position_bias", "kernel")
        u, v, kernel = (_as_floating("TransformerXL", name, getattr(self, name)) for name in names)
        if checks.number("TransformerXL.base", self.base) <= 0:
            raise ValueError(f"TransformerXL.base must be above 0, got {self.base}; give 10000.0")
        heads = (dims.N, dims.H)
        if u.shape != heads or v.shape != heads:
            raise ValueError(
                f"TransformerXL's biases must have shape [N, H] = {heads}, got {u.shape} and "
                f"{v.shape}"
            )
        if kernel.shape[1:] != heads or len(kernel) % 2:
            raise ValueError(
                f"TransformerXL.kernel must have shape [D, N, H] with (N, H) = {heads} and an even "
                f"D, got {kernel.shape}; of one that is learned, D is the field features"
            )
        return self.replace(content_bias=u, position_bias=v, kernel=jnp.moveaxis(kernel, 1, 0))

    def of_vectors(self, score: jax.Array, at: At, q: jax.Array, k: jax.Array) -> jax.Array:
        """See `ScoreMod.of_vectors`.

        No r_d is ever made: sin(d·w) = sin(i·w)·cos(j·w) − cos(i·w)·sin(j·w), and so on, so the
        sum over r_d is a product with sinusoids of the keys' positions.
        """
        u, v, kernel = (
            take_heads(x.astype(score.dtype), at)
            for x in (self.content_bias, self.position_bias, self.kernel)
        )
        scale = q.shape[-1] ** -0.5
        content = jnp.einsum("...h,...sh->...s", scale * u, k)[..., None, :]
        q = jnp.einsum("...th,...dh->...td", q + scale * v[..., None, :], kernel)
        sin_part, cos_part = jnp.split(q, 2, -1)
        # Counted from the first query: where both are far out, their angles would be rounded.
        first = at.q[..., :1, :]
        (sin_i, cos_i), (sin_j, cos_j) = (
            self._waves(x - first, kernel.shape[-2], score.dtype)
            for x in (at.q, jnp.swapaxes(at.k, -1, -2))
        )
        q = jnp.concatenate(
            [sin_part * sin_i + cos_part * cos_i, cos_part * sin_i - sin_part * cos_i], -1
        )
        waves = jnp.concatenate([cos_j, sin_j], -1)
        return score + content + jnp.einsum("...td,...sd->...ts", q, waves)

    def _waves(self, places: Array, features: int, dtype: jnp.dtype) -> Vectors:
        """Return sines and cosines [..., T, D/2] of places [..., T, 1]."""
        powers = 2 * np.arange(features // 2) / features
        waves = jnp.asarray(float(self.base) ** -powers, dtype)
        angles = jnp.asarray(places).astype(dtype) * shapes.lead(waves, places.ndim)
        return jnp.sin(angles), jnp.cos(angles)


def take_heads(x: jax.Array, at: At) -> jax.Array:
    """Take from x [N, ...] the entry of each score's head, with the axes before [T, S]."""
    return jnp.take(x, jnp.asarray(at.head)[..., 0, 0], axis=0, mode="clip")


def _as_floating(owner: str, name: str, x: Any) -> jax.Array:
    if x is None:
        raise ValueError(
            f"{owner} must have a {name} here, got None; give one, or give it in the field scores= "
            f"of a layer or a stack, which learns one"
        )
    return jnp.asarray(checks.floating(f"{owner}.{name}", x))


def relative_bucket(
    distance: Array, buckets: int, bidirectional: bool = True, max_distance: int = 128
) -> jax.Array:
    """Return the bucket, int32, of each distance j − i; see `RelativeBias`."""
    _check_distance(buckets, bidirectional, max_distance)
    distance = jnp.asarray(distance)
    first = jnp.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        first = jnp.where(distance > 0, buckets, 0)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    exact = buckets // 2
    # Compared in integers: a float32 logarithm puts some boundaries one bucket too low.
    starts = _bucket_starts(exact, buckets - exact, max_distance)
    return sum(((distance >= start).astype(jnp.int32) for start in starts), first) + jnp.minimum(
        distance, exact
    )


@functools.cache
def _bucket_starts(exact: int, count: int, max_distance: int) -> tuple[int, ...]:
    """Return the least distance of each of `count` logarithmic buckets but the first.

    Bucket m of them starts at the least integer d ≥ exact·(max_distance/exact)^(m/count).
    """
    starts = []
    for m in range(1, count):
        d = math.floor(exact * (max_distance / exact) ** (m / count))
        # Compare powers, which are exact integers, in place of d and the boundary.
        while d**count < max_distance**m * exact ** (count - m):
            d += 1
        starts.append(d)
    return tuple(starts)


def _check_distance(buckets: int, bidirectional: bool, max_distance: int) -> None:
    """Check that buckets that grow up to max_distance have room after the exact ones."""
    exact = (buckets // 2 if bidirectional else buckets) // 2
    checks.positive(max_distance=max_distance)
    if max_distance <= exact:
        raise ValueError(
            f"max_distance must exceed {exact}, the distances with a bucket of their own out of "
            f"{buckets} buckets, got {max_distance}; raise it, or give a table of fewer buckets"
        )
