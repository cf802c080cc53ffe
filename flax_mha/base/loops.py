"""Operations and loops that JAX traces quickly, and that Python runs outside jit.

Tracing `jax.numpy` takes several times as long as `jax.lax`. Outside jit, JAX would compile a loop
or a branch at each call.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from flax_mha.base.checks import is_concrete


def select(where: jax.Array, one: jax.Array | float, other: jax.Array | float) -> jax.Array:
    """Return `jnp.where(where, one, other)` of float arrays, or of one and a number."""
    like = other if isinstance(one, float) else one
    # Outside jit, `jax_debug_infs` would report an array of −∞.
    if not isinstance(like, jax.core.Tracer) or where.shape != like.shape:
        return jnp.where(where, one, other)
    one, other = (lax.full_like(like, x) if isinstance(x, float) else x for x in (one, other))
    return lax.select(where, one, other)


def is_eager(*trees: Any) -> bool:
    """Tell if this host has the values of all arrays, so that Python can branch on them."""
    return all(is_concrete(x) for x in jax.tree.leaves(trees))


def cond(which: Any, one: Callable[[], Any], other: Callable[[], Any]) -> Any:
    """Do what `jax.lax.cond` does."""
    return (one if which else other)() if is_eager(which) else lax.cond(which, one, other)


def repeat(first: Any, end: Any, step: Callable[[Any, Any], Any], carry: Any) -> Any:
    """Do what `jax.lax.fori_loop` does: carry = step(i, carry) for first ≤ i < end."""
    if not is_eager(first, end, carry):
        return lax.fori_loop(first, end, step, carry)
    for i in range(int(first), int(end)):
        carry = step(jnp.int32(i), carry)
    return carry


def scan(step: Callable[[Any, Any], Any], carry: Any, xs: Any, reads: Any = ()) -> Any:
    """Do what `jax.lax.scan` does. `reads` are other arrays that `step` reads."""
    count = len(jax.tree.leaves(xs)[0]) if is_eager(carry, xs, reads) else 0
    if count == 0:
        return lax.scan(step, carry, xs)
    results = []
    for i in range(count):
        carry, result = step(carry, jax.tree.map(lambda x, i=i: x[i], xs))
        results.append(result)
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *results)


def map_blocks(fn: Callable[[Any], Any], xs: Any, reads: Any, together: int | None = None) -> Any:
    """Do what `jax.lax.map` does. `reads` are other arrays that `fn` reads."""
    if not is_eager(xs, reads):
        return lax.map(fn, xs, batch_size=together)
    return scan(lambda carry, x: (carry, fn(x)), (), xs)[1]
