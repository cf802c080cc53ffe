"""What keeps NaN and infinity out of the products that would spread them, for 0·NaN is NaN."""

import jax
import jax.numpy as jnp


@jax.custom_jvp
def finite(x: jax.Array) -> jax.Array:
    """Gives x with 0 where it is not finite, and its derivative as if it were x.

    Where a mask forbids what is not finite the derivative is 0 already, elsewhere it is NaN.
    """
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))


@finite.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return finite(*primals), *tangents


def poison(x: jax.Array) -> jax.Array:
    """0 for each vector of x [..., F] that is finite, NaN for the others, [...]."""
    zeros = jax.lax.stop_gradient(x) * 0
    # A product, for XLA:CPU is far slower at sums, and at `all`, over a short last axis.
    return jnp.matmul(zeros, jnp.ones(x.shape[-1], x.dtype))


def guard(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Moves the NaN of a value to its key, from where it spreads if the mask allows.

    In the values themselves it would meet weights of 0.
    """
    return k + poison(v)[..., None], finite(v)


def least(dtype: jnp.dtype) -> float:
    """The least number of a dtype: a bound of scores to begin a maximum with.

    Other than −∞ it can be subtracted from itself, and is no fault where JAX looks for infinities
    (`jax_debug_infs`).
    """
    return float(jnp.finfo(dtype).min)
