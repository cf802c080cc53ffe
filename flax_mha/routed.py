"""Tokens through the experts that they are sent to, on one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.typing import PrecisionLike
from jax import lax

from flax_mha.kernels.tiling import vary


def in_turn(
    expert: Callable[..., jax.Array], x: jax.Array, ids: jax.Array, p: jax.Array, layers: Any,
    precision: PrecisionLike,
) -> jax.Array:  # fmt: skip
    """All tokens through one expert after another, but for experts that none of them is sent to.

    For CPUs, where `lax.ragged_dot` computes every expert for every token, all at once: of 1,024
    tokens with 2 of 8 experts a gradient takes 1.7 times as long by rows, and 7 times the memory;
    with 4 of 32 it takes 4 and 49 times (two cores, 256 features, 512 hidden).

    Args:
      expert: see `Experts._expert`.
      x: [n, D].
      ids: [n, top_k], of the experts in `layers`; others are as many as there are.
      p: [n, top_k].
      layers: pairs of kernels [E, in, out] and biases [E, out] or None.
      precision: of the products.
    """

    def product(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = jnp.matmul(x, kernel, precision=precision)
        return y if bias is None else y + bias[None]

    @jax.checkpoint
    def add(y: jax.Array, x: jax.Array, p: jax.Array, mine: jax.Array, layers: Any) -> jax.Array:
        # What another expert's token would overflow to would reach gradients as NaN.
        found = expert(product, jnp.where(mine.any(-1)[:, None], x, 0), layers)
        return y + found.astype(p.dtype) * jnp.sum(jnp.where(mine, p, 0), -1)[:, None]

    def step(y: jax.Array, one: Any) -> tuple[jax.Array, None]:
        mine = ids == one[0]
        return lax.cond(mine.any(), add, lambda y, *_: y, y, x, p, mine, one[1]), None

    y = vary(jnp.zeros(x.shape, p.dtype), (x, ids, p, layers))
    return lax.scan(step, y, (jnp.arange(len(layers[0][0])), layers))[0]


def by_rows(
    expert: Callable[..., jax.Array], x: jax.Array, ids: jax.Array, p: jax.Array, layers: Any,
    precision: PrecisionLike,
) -> jax.Array:  # fmt: skip
    """Each token through its own experts, in products over rows sorted by expert: see `in_turn`."""
    count, flat = len(layers[0][0]), ids.reshape(-1)
    order = jnp.argsort(flat)
    of, sizes = flat[order], jnp.bincount(flat, length=count)
    here = (of < count)[:, None]

    def product(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = lax.ragged_dot(x, kernel, sizes, precision)
        return y if bias is None else y + bias.at[of].get(mode="clip")

    # Rows of no expert here are what `ragged_dot` leaves there, forward and backward.
    y = jnp.where(here, expert(product, jnp.where(here, x[order // ids.shape[1]], 0), layers), 0)
    y = y[jnp.argsort(order)].reshape(*ids.shape, -1)
    return jnp.sum(y.astype(p.dtype) * p[..., None], 1)


# Elsewhere `by_rows`.
METHODS = {"cpu": in_turn}
