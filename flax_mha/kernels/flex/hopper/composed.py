"""Operations that are composed of others, because a GPU's fast ones lose digits or are missing."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp


def _tanh(x: jax.Array) -> jax.Array:
    return 1 - 2 / (1 + jnp.exp2(jnp.clip(x, -15, 15) * (2 * math.log2(math.e))))


def _floor(x: jax.Array) -> jax.Array:
    whole = x.astype(jnp.int32).astype(x.dtype)
    return jnp.where(jnp.abs(x) < 2**23, whole - (whole > x).astype(x.dtype), x)


def _in_one_turn(x: jax.Array) -> jax.Array:
    """Return x − 2π·n in [−π, π]. The parts of 2π have few digits, so that products are exact."""
    turns = _floor(x * (0.5 / math.pi) + 0.5)
    for part in (6.28125, 1.9353071795e-3):
        x = x - turns * part
    return x


def _log1p(x: jax.Array) -> jax.Array:
    u = 1 + x
    return jnp.where(u == 1, x, jnp.log(u) * (x / jnp.where(u == 1, 1.0, u - 1)))


def _expm1(x: jax.Array) -> jax.Array:
    near = jnp.ones_like(x)
    for n in range(8, 1, -1):
        near = 1 + near * x / n
    return jnp.where(jnp.abs(x) < 0.5, near * x, jnp.exp(x) - 1)


COMPOSED: dict[str, Callable] = {
    "tanh": _tanh, "log1p": _log1p, "expm1": _expm1, "floor": _floor, "ceil": lambda x: -_floor(-x),
    "sin": lambda x: jnp.sin(_in_one_turn(x)), "cos": lambda x: jnp.cos(_in_one_turn(x)),
    "is_finite": lambda x: jnp.abs(x) < jnp.inf, "add_any": lambda x, y: x + y,
    "not": lambda x: x ^ jnp.asarray(True if x.dtype == jnp.bool_ else -1).astype(x.dtype),
}  # fmt: skip
