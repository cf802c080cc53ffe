"""Ways for JAX to trace less: operations that are not jitted, and no loops of one step.

Functions and operators of `jax.numpy` are jitted: JAX traces each anew for each shape, which for
the tiles of a kernel takes several times as long as `jax.lax` does.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def select(where: jax.Array, one: jax.Array | float, other: jax.Array | float) -> jax.Array:
    """Return `jnp.where(where, one, other)` for arrays of floats, or one and a number."""
    like = other if isinstance(one, float) else one
    # Outside of a trace an array of −∞ would be what `jax_debug_infs` looks for.
    if not isinstance(like, jax.core.Tracer) or where.shape != like.shape:
        return jnp.where(where, one, other)
    one, other = (lax.full_like(like, x) if isinstance(x, float) else x for x in (one, other))
    return lax.select(where, one, other)


def scan_blocks(
    job: Callable[[Any, Any], Any], carry: Any, xs: Sequence[jax.Array], first: int, count: int
) -> Any:
    """Scan carry, result = job(carry, (number of the job, *blocks)) over blocks of xs.

    Args:
      job: the function.
      carry: its first argument.
      xs: arrays [G, blocks, ...].
      first: the first block.
      count: the number of blocks.

    Returns:
      The last carry, and the results [G, count, ...].
    """
    G, whole = xs[0].shape[:2]
    blocks = xs if count == whole else [lax.slice_in_dim(x, first, first + count, 1, 1) for x in xs]
    if G == 1 and count == 1:
        carry, found = job(carry, (np.int32(0), *(lax.squeeze(x, (0, 1)) for x in blocks)))
        return carry, jax.tree.map(lambda x: lax.expand_dims(x, (0, 1)), found)
    flat = [lax.collapse(x, 0, 2) for x in blocks]
    carry, found = lax.scan(job, carry, (jnp.arange(G * count, dtype=jnp.int32), *flat))
    return carry, jax.tree.map(lambda x: x.reshape(G, count, *x.shape[1:]), found)


def scan_or_map(group: Callable[[Any, Any], Any], sums: Any, xs: Any, together: int) -> Any:
    """Loop sums, results = group(sums, x) over the first axis of xs; so many at once if none sums.

    Args:
      group: the function.
      sums: its first argument; without leaves if nothing is summed.
      xs: arrays of equal first axes.
      together: how many of them are computed at once.

    Returns:
      The last sums, and the results.
    """
    if jax.tree.leaves(sums) or together == 1:
        return lax.scan(group, sums, xs)
    return sums, lax.map(lambda x: group(sums, x)[1], xs, batch_size=together)
