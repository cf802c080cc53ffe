"""Rotary position embeddings on several axes: images, videos, mixed inputs."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha.base import checks, shapes
from flax_mha.base.frequencies import as_floats
from flax_mha.positions import rope


@dataclasses.dataclass(frozen=True)
class Axial(rope.PairRotation):
    """A rotary embedding on a grid. Each axis rotates the same number of pairs.

        θ = cₐ / base^(p / P),   p = 0 … P − 1, P = H / (2·axes)

    for the coordinate cₐ on axis a, with the pairs of one axis after another. Tokens are in
    row-major order, after the prefix.

    Attributes:
      sizes: the tokens on each axis: (height, width), or (frames, height, width).
      base: the ratio of the slowest to the fastest wavelength.
      span: coordinates are the centers of tokens, from −span to span (default: 0 … n − 1).
      prefix: the tokens before the grid that are not rotated, such as class tokens.

    Raises:
      ValueError: for a static position beyond the grid. A traced one makes its token NaN.

    Sources: Heo et al., "Rotary Position Embedding for Vision Transformer", 2024; "DINOv3", 2025.
    """

    sizes: Sequence[int]
    base: float = 10_000.0
    span: float | None = None
    prefix: int = 0

    def angles(self, x: jax.Array, positions: jax.Array) -> rope.Angles:
        """Return the angles for x [*B, T, N, H] and positions int [T] or [*B, T]."""
        sizes, end = self.sizes, self.prefix + math.prod(self.sizes)
        positions = shapes.per_token("positions", positions, x.shape[:-2])
        remedy = f"raise Axial.sizes, {sizes} after a prefix of {self.prefix}, or give positions="
        checks.within("positions", positions, end, remedy)
        positions = jnp.asarray(positions)
        pairs, remainder = divmod(x.shape[-1], 2 * len(sizes))
        if remainder:
            raise ValueError(
                f"Axial turns pairs, the same number for each of {len(sizes)} axes, so H must be a "
                f"multiple of {2 * len(sizes)}, got {x.shape[-1]}; choose another head_dim"
            )
        index = jnp.maximum(positions - self.prefix, 0)
        by_axis = []
        for n, size in enumerate(sizes):
            c, most = index // math.prod(sizes[n + 1 :]) % size, size
            if self.span is not None:
                c = self.span * ((2 * as_floats(c) + 1) / size - 1)
                most = math.ceil(abs(self.span))
            by_axis.append(rope.compute_angles(c, pairs, 1 / pairs, self.base, most))
        theta = jnp.concatenate(by_axis, -1)
        outside = (positions < 0) | (positions >= end)
        theta = jnp.where((positions < self.prefix)[..., None], 0.0, theta)
        theta = jnp.where(outside[..., None], jnp.nan, theta)
        return theta, False, 1.0


@dataclasses.dataclass(frozen=True)
class MRope(rope.PairRotation):
    """A multimodal rotary embedding. Each section of the pairs has its own coordinate.

        θ = c / base^(2p / H),   c the coordinate of pair p's section

    The `positions` of the layer are [T, sections] or [*B, T, sections], such as the time, row and
    column of each token, or [T] or [*B, T] for text.

    Attributes:
      sections: the number of pairs for each coordinate, H/2 in all: (16, 24, 24) in Qwen2-VL.
      base: the ratio of the slowest to the fastest wavelength.

    Source: Wang et al., "Qwen2-VL", 2024, section 2.1.
    """

    sections: Sequence[int]
    base: float = 10_000.0

    def angles(self, x: jax.Array, positions: jax.Array) -> rope.Angles:
        """Return the angles for x [*B, T, N, H] and int positions, for each section or for all."""
        sections = tuple(self.sections)
        at = jnp.asarray(checks.integers("positions", positions))
        rows, pairs = x.shape[:-2], sum(sections)
        if 2 * pairs != x.shape[-1]:
            raise ValueError(
                f"MRope.sections {sections} must have H/2 pairs in all, of H={x.shape[-1]}; got "
                f"{pairs}"
            )
        if at.shape in {rows, rows[-1:]}:
            at = jnp.broadcast_to(at[..., None], (*at.shape, len(sections)))
        if at.shape not in {(*rows, len(sections)), (rows[-1], len(sections))}:
            raise ValueError(
                f"positions must have shape [*B, T, {len(sections)}] or [*B, T] with [*B, T] = "
                f"{rows}, got {at.shape}; give each token a coordinate for each section"
            )
        theta = rope.compute_angles(at, pairs, 1 / pairs, self.base)
        by_section = jnp.split(theta, np.cumsum(sections)[:-1], -1)
        return jnp.concatenate([x[..., n, :] for n, x in enumerate(by_section)], -1), False, 1.0
