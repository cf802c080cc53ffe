"""The online softmax: scores come tile by tile, and each query has a row of them.

A row is kept as its greatest score so far and the sum of the exponentials of the distances to it:

    top′ = max(top, s);   total′ = total·exp(top − top′) + Σ exp(s − top′)

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

import jax
import jax.numpy as jnp

from flax_mha.kernels.finite import least
from flax_mha.kernels.plan import Plan


def begin(total: jax.Array) -> jax.Array:
    """The greatest score where nothing has been seen: finite, so that it can be subtracted."""
    return total + least(total.dtype)


def step(
    top: jax.Array, total: jax.Array, s: jax.Array, allowed: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Adds a tile of scores to rows [..., 1].

    Args:
      top: the greatest score so far.
      total: the sum of exponentials.
      s: scores [..., n], −∞ where masked; or the least number there, and
      allowed: where they are not.

    Returns:
      top and total, the exponentials of s, and what those before are to be multiplied by.
    """
    new = jnp.maximum(top, s.max(-1, keepdims=True))
    p, old = jnp.exp(s - new), jnp.exp(top - new)
    p = p if allowed is None else jnp.where(allowed, p, 0.0)
    return new, total * old + p.sum(-1, keepdims=True), p, old


def with_sinks(
    plan: Plan, sinks: jax.Array | None, top: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The greatest score and the sum of exponentials [R, G·nq·bq] of keys, with those of sinks."""
    if sinks is None:
        return top, total
    by_head = jnp.repeat(sinks, plan.nq * plan.block_q).reshape(plan.dims.K, -1)
    return sunk(jnp.tile(by_head, (top.shape[0] // plan.dims.K, 1)), top, total)


def sunk(sink: jax.Array, top: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One sink more: see `with_sinks`."""
    new = jnp.maximum(top, sink)
    return new, total * jnp.exp(top - new) + jnp.exp(sink - new)


def lse_of(top: jax.Array, total: jax.Array) -> jax.Array:
    """The lse of a greatest score and of the sum of the exponentials of the distances to it.

    The least number where nothing is seen: not −∞, which `jax_debug_infs` would find in rows that
    only fill a block.
    """
    empty = total == 0
    return jnp.where(empty, least(top.dtype), top + jnp.log(jnp.where(empty, 1.0, total)))


def of_rows(
    plan: Plan, sinks: jax.Array | None, out: jax.Array, top: jax.Array, total: jax.Array,
    dout: jax.Array, dlse: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """What the gradient of a tile needs of each query.

    Args:
      plan: the division.
      sinks: [N] or None.
      out: [R, G·nq·bq, Hv].
      top: the greatest score of the keys [R, G·nq·bq].
      total: the sum of the exponentials of the distances to it; 0 where no key is seen.
      dout: the cotangent of out.
      dlse: that of the lse.

    Returns:
      dout, 0 where no key is seen; shift, share and δ, [R, G·nq·bq, 3]: with them
      p = exp(score − shift)·share and d score = p·(dp − δ).
    """
    # What is asked of such a row, NaN included, must not meet its weights of 0.
    dout = jnp.where((total == 0)[..., None], 0.0, dout)
    shift, total = with_sinks(plan, sinks, top, total)
    dlse = jnp.where(total == 0, 0.0, dlse)
    # Σ dout·out, less what lse itself is asked. (As an einsum, for XLA:CPU takes ten times as
    # long for the sum of a product of rank 5.)
    delta = jnp.einsum("...h,...h->...", dout, out, preferred_element_type=total.dtype) - dlse
    # Not exp(score − lse), which would lose the last digits of large scores.
    return dout, jnp.stack([shift, 1 / jnp.where(total == 0, 1.0, total), delta], -1)


def sink_gradient(plan: Plan, sinks: jax.Array, rows: jax.Array) -> jax.Array:
    """A sink's weight gives nothing: d score = p·(0 − δ), over all queries of its head."""
    shift, share, delta = jnp.moveaxis(
        rows.reshape(-1, plan.dims.N, plan.nq * plan.block_q, 3), -1, 0
    )
    return -jnp.sum(jnp.exp(sinks[None, :, None] - shift) * share * delta, (0, 2))
