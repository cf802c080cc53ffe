"""Rotary position embeddings, which rotate pairs of features by angles ∝ position."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha import sharding
from flax_mha.base import checks, shapes
from flax_mha.base.frequencies import Frequencies, as_floats
from flax_mha.positions.rope_scaling import Growing, Scaling
from flax_mha.positions.turn import Turn


def compute_angles(
    positions: Any, pairs: int, step: float, base: float, end: int | None = None
) -> jax.Array:
    """Return the angles positions / base^(c·step) of pairs c [*P, pairs], for positions < `end`."""
    dtype = as_floats(positions).dtype
    rounded = jnp.asarray(base, dtype) ** (-step * jnp.arange(pairs, dtype=dtype))
    theta = base ** (-step * np.arange(pairs))
    return Frequencies.of(theta, dtype)._replace(theta=rounded).angles(positions, end)


# Angles float32 or float64 [*B|1, T, P] of the first 2·P features, whether pairs are (0, 1),
# (2, 3), … or (0, P), (1, P + 1), …, and a factor of the rotated features.
Angles: TypeAlias = tuple[jax.Array, bool, float]


class PairRotation:
    """A rotation of pairs of features, which a kernel can apply."""

    def angles(self, x: jax.Array, positions: jax.Array) -> Angles:
        """Check x [*B, T, N, H] and its positions, and return its angles."""
        raise NotImplementedError

    def turn(self, x: jax.Array, positions: jax.Array) -> Turn:
        """Return x and its rotation, for a kernel to apply."""
        return Turn.of(x, *self.angles(x, positions))

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Rotate x [*B, T, N, H] by its positions, computed in the dtype of the angles."""
        theta, interleaved, size = self.angles(x, positions)

        def rotate(x: jax.Array, theta: jax.Array) -> jax.Array:
            if sharding.platform() == "tpu":
                # Swap the halves by a matrix: a TPU would write them to memory, padded.
                return Turn.of(x, theta, interleaved, size)(x)
            theta = shapes.lead(theta[..., None, :], x.ndim)  # The same angle for every head.
            cos, sin = (f(theta) if size == 1 else size * f(theta) for f in (jnp.cos, jnp.sin))
            R = 2 * theta.shape[-1]
            rotated, unrotated = x[..., :R].astype(theta.dtype), x[..., R:]
            join: Any = jnp.stack if interleaved else jnp.concatenate
            split = (rotated[..., ::2], rotated[..., 1::2])
            x1, x2 = split if interleaved else jnp.split(rotated, 2, -1)
            pairs = join((x1 * cos - x2 * sin, x2 * cos + x1 * sin), axis=-1)
            pairs = pairs.reshape(rotated.shape).astype(x.dtype)
            return jnp.concatenate([pairs, unrotated], axis=-1)

        return sharding.auto(rotate, (), x, theta)


Rotation: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]


def rotary(
    x: jax.Array, positions: jax.Array, *, base: float = 10_000.0, fraction: float = 1.0,
    interleaved: bool = False, scaling: Scaling | None = None,
) -> jax.Array:  # fmt: skip
    """Rotate pairs of features of x by angles proportional to the position (RoPE).

        (x₁, x₂) ← (x₁ cos θ − x₂ sin θ, x₂ cos θ + x₁ sin θ),   θ = i / base^(2c/R)

    for pair c of the first R = fraction·H features at position i.

    Args:
      x: queries or keys [*B, T, N, H].
      positions: int [T] or [*B, T].
      base: the ratio of the slowest to the fastest wavelength.
      fraction: the share of the features that is rotated. R must be even.
      interleaved: True for pairs (0, 1), (2, 3), … (GPT-J); False for (0, R/2), (1, R/2 + 1), …
        (LLaMA).
      scaling: `Interpolation(…)`, `Ntk(…)`, `Yarn(…)`, …, which change θ for longer sequences.

    Returns:
      [*B, T, N, H] in the dtype of x, computed in float32 or wider.

    Source: Su et al., "RoFormer", 2021.
    """
    return Rotary(base, fraction, interleaved, scaling)(x, positions)


@dataclasses.dataclass(frozen=True)
class Rotary(PairRotation):
    """The function `rotary` with its options, for the field `rotary` of a layer."""

    base: float = 10_000.0
    fraction: float = 1.0
    interleaved: bool = False
    scaling: Scaling | None = None

    @property
    def reads_length(self) -> bool:
        """True if the angles depend on the length of each row."""
        return isinstance(self.scaling, Growing)

    def angles(self, x: jax.Array, positions: jax.Array) -> Angles:
        """Return the angles for x [*B, T, N, H] and its positions."""
        base, scaling, interleaved = self.base, self.scaling, self.interleaved
        rows = checks.floating("x", x).shape[:-2]
        positions = shapes.per_token("positions", positions, rows)
        R = round(self.fraction * x.shape[-1])
        if R < 2 or R % 2 or x.shape[-1] < R:
            raise ValueError(
                f"fraction·H must be even, at least 2 and at most H for rotary, got fraction="
                f"{self.fraction} of H={x.shape[-1]}; choose an even head_dim or another fraction"
            )
        if scaling is None:
            return compute_angles(positions, R // 2, 2 / R, base), interleaved, 1.0
        at = as_floats(positions)
        if isinstance(scaling, Growing):
            # The length of each row, up to its newest token.
            frequencies, size = scaling(R, base, jnp.max(at, -1, keepdims=True, initial=-1) + 1)
        else:
            theta, size = scaling(R, base)
            frequencies = Frequencies.of(theta, at.dtype)
        return frequencies.angles(positions), interleaved, size
