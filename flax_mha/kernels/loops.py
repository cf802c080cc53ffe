"""Operations and loops that JAX traces quickly.

JAX traces the functions of `jax.numpy`, which are jitted, again for each shape. For a kernel's
tiles this takes several times as long as `jax.lax`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def select(where: jax.Array, one: jax.Array | float, other: jax.Array | float) -> jax.Array:
    """Return `jnp.where(where, one, other)` for float arrays, or a float array and a number."""
    like = other if isinstance(one, float) else one
    # Outside a trace, `jax_debug_infs` would report an array of −∞.
    if not isinstance(like, jax.core.Tracer) or where.shape != like.shape:
        return jnp.where(where, one, other)
    one, other = (lax.full_like(like, x) if isinstance(x, float) else x for x in (one, other))
    return lax.select(where, one, other)


def scan_blocks(
    job: Callable[[Any, Any], Any], carry: Any, xs: Sequence[jax.Array], first: int, count: int
) -> Any:
    """Scan carry, result = job(carry, (index, *blocks)) over blocks of arrays.

    The blocks are `count` blocks from `first` of the arrays xs [G, blocks, ...], and the index
    counts the calls. Returns the last carry, and the results [G, count, ...].
    """
    G, length = xs[0].shape[:2]
    if count != length:
        xs = [lax.slice_in_dim(x, first, first + count, 1, 1) for x in xs]
    if G == 1 and count == 1:
        carry, result = job(carry, (np.int32(0), *(lax.squeeze(x, (0, 1)) for x in xs)))
        return carry, jax.tree.map(lambda x: lax.expand_dims(x, (0, 1)), result)
    flat = [lax.collapse(x, 0, 2) for x in xs]
    carry, results = lax.scan(job, carry, (jnp.arange(G * count, dtype=jnp.int32), *flat))
    return carry, jax.tree.map(lambda x: x.reshape(G, count, *x.shape[1:]), results)


def scan_or_map(group: Callable[[Any, Any], Any], sums: Any, xs: Any, together: int) -> Any:
    """Scan sums, results = group(sums, x) over the first axis of xs.

    Without sums (an empty tree) this is a map, which computes `together` entries at once.
    """
    if jax.tree.leaves(sums) or together == 1:
        return lax.scan(group, sums, xs)
    return sums, lax.map(lambda x: group(sums, x)[1], xs, batch_size=together)
