"""Operations and loops that JAX traces quickly.

JAX traces the functions of `jax.numpy`, which are jitted, again for each shape. For a kernel's
tiles this takes several times as long as `jax.lax`. Outside jit, JAX compiles a loop or a branch
anew at each call if its function is made in the call, so these run in Python.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flax_mha.base.checks import is_concrete


def select(where: jax.Array, one: jax.Array | float, other: jax.Array | float) -> jax.Array:
    """Return `jnp.where(where, one, other)` for float arrays, or a float array and a number."""
    like = other if isinstance(one, float) else one
    # Outside a trace, `jax_debug_infs` would report an array of −∞.
    if not isinstance(like, jax.core.Tracer) or where.shape != like.shape:
        return jnp.where(where, one, other)
    one, other = (lax.full_like(like, x) if isinstance(x, float) else x for x in (one, other))
    return lax.select(where, one, other)


def is_eager(*trees: Any) -> bool:
    """Return True if this host has the values of all arrays, so that Python can branch on them."""
    return all(is_concrete(x) for x in jax.tree.leaves(trees))


def cond(which: Any, one: Callable[[], Any], other: Callable[[], Any]) -> Any:
    """Return the result of one function or the other, as `jax.lax.cond`."""
    return (one if which else other)() if is_eager(which) else lax.cond(which, one, other)


def repeat(first: Any, end: Any, step: Callable[[Any, Any], Any], carry: Any) -> Any:
    """Run carry = step(i, carry) for i from `first` to before `end`, as `jax.lax.fori_loop`."""
    if not is_eager(first, end, carry):
        return lax.fori_loop(first, end, step, carry)
    for i in range(int(first), int(end)):
        carry = step(jnp.int32(i), carry)
    return carry


def scan(step: Callable[[Any, Any], Any], carry: Any, xs: Any, reads: Any = ()) -> Any:
    """Scan carry, result = step(carry, x), where step also reads some arrays, as `jax.lax.scan`."""
    count = len(jax.tree.leaves(xs)[0]) if is_eager(carry, xs, reads) else 0
    if count == 0:
        return lax.scan(step, carry, xs)
    results = []
    for i in range(count):
        carry, result = step(carry, jax.tree.map(lambda x, i=i: x[i], xs))
        results.append(result)
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *results)


def map_blocks(fn: Callable[[Any], Any], xs: Any, reads: Any, together: int | None = None) -> Any:
    """Map fn, which also reads some arrays, over the first axis of xs, as `jax.lax.map`."""
    if not is_eager(xs, reads):
        return lax.map(fn, xs, batch_size=together)
    return scan(lambda carry, x: (carry, fn(x)), (), xs)[1]


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
    carry, results = scan(job, carry, (jnp.arange(G * count, dtype=jnp.int32), *flat))
    return carry, jax.tree.map(lambda x: x.reshape(G, count, *x.shape[1:]), results)


def scan_or_map(group: Callable[[Any, Any], Any], sums: Any, xs: Any, together: int) -> Any:
    """Scan sums, results = group(sums, x) over the first axis of xs.

    Without sums (an empty tree) this is a map, which computes `together` entries at once.
    """
    if jax.tree.leaves(sums) or together == 1:
        return scan(group, sums, xs)
    return sums, map_blocks(lambda x: group(sums, x)[1], xs, (), together)
