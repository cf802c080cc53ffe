"""Rotary position embeddings, which rotate pairs of features by angles ∝ position."""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha import sharding
from flax_mha.base import checks, shapes
from flax_mha.positions.rope_scaling import Growing, Scaling


def as_floats(positions: jax.Array) -> jax.Array:
    """Return positions as float32, or float64 if they are."""
    at = jnp.asarray(positions)
    return at.astype(jnp.float64 if at.dtype == jnp.float64 else jnp.float32)


def compute_angles(positions: jax.Array, pairs: int, step: float, base: float) -> jax.Array:
    """Return the angles of pairs c, positions / base^(c·step), float32 or float64 [*P, pairs]."""
    at = as_floats(positions)
    c = jnp.arange(pairs, dtype=at.dtype)
    return at[..., None] * shapes.lead(jnp.asarray(base, at.dtype) ** (-step * c), at.ndim + 1)


def rotate_pairs(x: jax.Array, theta: jax.Array, interleaved: bool, size: float = 1.0) -> jax.Array:
    """Rotate the first 2·P features of x [*B, T, N, H] by angles theta [*B|1, T, P].

    The rotation is in the dtype of the angles. It is of pairs (0, 1), (2, 3), … if `interleaved`,
    else of (0, P), (1, P + 1), … `size` is the factor of the rotated features.
    """

    def rotate(x: jax.Array, theta: jax.Array) -> jax.Array:
        theta = shapes.lead(theta[..., None, :], x.ndim)  # The same angle for every head.
        cos, sin = (f(theta) if size == 1 else size * f(theta) for f in (jnp.cos, jnp.sin))
        if sharding.platform() == "tpu":
            return _rotate_whole(x, cos, sin, interleaved)
        R = 2 * theta.shape[-1]
        rotated, unrotated = x[..., :R].astype(theta.dtype), x[..., R:]
        join = jnp.stack if interleaved else jnp.concatenate
        x1, x2 = (rotated[..., i::2] for i in (0, 1)) if interleaved else jnp.split(rotated, 2, -1)
        pairs = join((x1 * cos - x2 * sin, x2 * cos + x1 * sin), axis=-1).reshape(rotated.shape)
        return jnp.concatenate([pairs.astype(x.dtype), unrotated], axis=-1)

    return sharding.auto(rotate, (), x, theta)


def _rotate_whole(x: jax.Array, cos: jax.Array, sin: jax.Array, interleaved: bool) -> jax.Array:
    """Return x·cos ± partner(x)·sin, with the same numbers.

    A TPU pads the halves of x to whole vectors, and writes them. The product with a permutation is
    exact, and part of the pass that rotates.
    """
    H, R = x.shape[-1], 2 * cos.shape[-1]
    partner = np.arange(H)
    partner[:R] = partner[:R] ^ 1 if interleaved else np.roll(partner[:R], R // 2)
    swap = np.eye(H, dtype=np.float32)[partner]
    cos, sin = (
        jnp.repeat(a, 2, -1) if interleaved else jnp.concatenate([a, a], -1) for a in (cos, sin)
    )
    is_second = np.arange(R) % 2 == 1 if interleaved else np.arange(R) >= R // 2
    rest = [(0, 0)] * (cos.ndim - 1) + [(0, H - R)]
    cos = jnp.pad(cos, rest, constant_values=1)
    sin = jnp.pad(jnp.where(is_second, sin, -sin), rest)
    other = jnp.einsum("...h,hg->...g", x, jnp.asarray(swap, x.dtype), precision="highest",
                       preferred_element_type=cos.dtype)  # fmt: skip
    return (x.astype(cos.dtype) * cos + other * sin).astype(x.dtype)


def check_base(base: float) -> None:
    """Check that the base of the wavelengths is positive."""
    if checks.number("base", base) <= 0:
        raise ValueError(f"base must be above 0, got {base}; the usual value is 10,000")


def check_heads(x: jax.Array) -> jax.Array:
    """Check that x has the shape [*B, T, N, H], and return it."""
    checks.floating("x", x)
    if x.ndim < 3:
        raise ValueError(f"x must have shape [*B, T, N, H], got {x.shape}; split it into heads")
    return x


Rotation: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]


def rotary(
    x: jax.Array, positions: jax.Array, *, base: float = 10_000.0, fraction: float = 1.0,
    interleaved: bool = False, scaling: Scaling | None = None,
) -> jax.Array:  # fmt: skip
    """Apply a rotary position embedding, which rotates pairs of features.

        (x₁, x₂) ← (x₁ cos θ − x₂ sin θ, x₂ cos θ + x₁ sin θ),   θ = i / base^(2c/R)

    for pair c of the first R = fraction·H features at position i. The score of a query at i and a
    key at j then depends on the position only through i − j.

    Args:
      x: queries or keys [*B, T, N, H].
      positions: int [T] or [*B, T].
      base: the ratio of the slowest to the fastest wavelength.
      fraction: the share of the features that are rotated, so that R is even; others are unchanged.
      interleaved: True for pairs (0, 1), (2, 3), … (RoFormer, GPT-J); False for (0, R/2),
        (1, R/2 + 1), … (GPT-NeoX, LLaMA).
      scaling: the scaling of θ for longer sequences: `Interpolation`, `Ntk`, `Yarn`, `Llama3`,
        `DynamicNtk`, `LongRope` or `Proportional`.

    Returns:
      [*B, T, N, H] in the dtype of x; the rotation is computed in float32 or wider.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    check_heads(x)
    positions = shapes.per_token("positions", positions, x.shape[:-2])
    checks.flag("interleaved", interleaved)
    check_base(base)
    R = round(checks.number("fraction", fraction) * x.shape[-1])
    if R < 2 or R % 2 or x.shape[-1] < R:
        raise ValueError(
            f"fraction·H must be even, at least 2 and at most H for rotary, got "
            f"fraction={fraction} of H={x.shape[-1]}; choose an even head_dim or another fraction"
        )
    if scaling is None:
        return rotate_pairs(x, compute_angles(positions, R // 2, 2 / R, base), interleaved)
    if not isinstance(scaling, Scaling):
        raise TypeError(
            f"scaling must be of flax_mha.positions, got {checks.describe(scaling)}; give "
            f"Llama3(factor=8, original_length=8192), say"
        )
    at = as_floats(positions)
    if isinstance(scaling, Growing):
        # The length of each example, up to the newest of these tokens.
        theta, size = scaling(R, base, jnp.max(at, -1, keepdims=True, initial=-1) + 1)
    else:
        static_theta, size = scaling(R, base)
        theta = shapes.lead(jnp.asarray(static_theta, at.dtype), at.ndim + 1)
    return rotate_pairs(x, at[..., None] * theta, interleaved, size)


@dataclasses.dataclass(frozen=True)
class Rotary:
    """A callable for the layer's `rotary` field: the function `rotary` with its options."""

    base: float = 10_000.0
    fraction: float = 1.0
    interleaved: bool = False
    scaling: Scaling | None = None

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Call `rotary` with these settings."""
        return rotary(x, positions, **vars(self))
