"""What rotary position embeddings share: angles, and turning pairs of features by them."""

import jax
import jax.numpy as jnp

from flax_mha import inputs, shapes


def floats(positions: jax.Array) -> jax.Array:
    """Positions as float32 (float64 if given)."""
    at = jnp.asarray(positions)
    return at.astype(jnp.float64 if at.dtype == jnp.float64 else jnp.float32)


def angles(positions: jax.Array, pairs: int, step: float, base: float) -> jax.Array:
    """The angle of pair c, positions / base^(c·step): [*P, pairs], float32 (float64 if given)."""
    at = floats(positions)
    c = jnp.arange(pairs, dtype=at.dtype)
    return at[..., None] * shapes.lead(jnp.asarray(base, at.dtype) ** (-step * c), at.ndim + 1)


def turn(x: jax.Array, theta: jax.Array, interleaved: bool, size: float = 1.0) -> jax.Array:
    """Turns the first 2·P features of x [*B, T, N, H] by angles [*B|1, T, P], and scales them.

    Pairs are (0, 1), (2, 3), … if interleaved, (0, P), (1, P + 1), … else. In the dtype of x,
    computed in that of the angles.
    """
    theta = shapes.lead(theta[..., None, :], x.ndim)  # The same turn for every head.
    R = 2 * theta.shape[-1]
    turned, rest = x[..., :R].astype(theta.dtype), x[..., R:]
    cos, sin = (f(theta) if size == 1 else size * f(theta) for f in (jnp.cos, jnp.sin))
    if interleaved:
        x1, x2 = turned[..., ::2], turned[..., 1::2]
    else:
        x1, x2 = turned[..., : R // 2], turned[..., R // 2 :]
    pairs = (x1 * cos - x2 * sin, x2 * cos + x1 * sin)
    if interleaved:
        turned = jnp.stack(pairs, axis=-1).reshape(turned.shape)
    else:
        turned = jnp.concatenate(pairs, axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


def check_base(base: float) -> None:
    """The base of the wavelengths must be positive."""
    if inputs.number("base", base) <= 0:
        raise ValueError(f"base must be above 0, got {base}; 10,000 is the usual one")


def heads(x: jax.Array) -> jax.Array:
    """Queries or keys [*B, T, N, H], checked."""
    inputs.floating("x", x)
    if x.ndim < 3:
        raise ValueError(f"x must have shape [*B, T, N, H], got {x.shape}; split it into heads")
    return x
