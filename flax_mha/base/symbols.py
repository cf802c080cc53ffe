"""Sizes that may be symbols of `jax.export`, known when the program is called."""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax


def is_symbolic(*sizes: Any) -> bool:
    """Return whether any of the sizes is a symbol."""
    return any(jax.export.is_symbolic_dim(size) for size in sizes)


def at_most(size: Any, most: Any) -> bool:
    """Return whether a size is known to be at most another one."""
    try:
        return bool(size <= most)
    except jax.errors.InconclusiveDimensionOperation:
        return False


def count_up(size: Any) -> Any:
    """Return int32 0 … size−1: a NumPy array, known before tracing, unless the size is a symbol."""
    return (jnp if is_symbolic(size) else np).arange(size, dtype=np.int32)


def divide(index: Any, by: Any) -> tuple[Any, Any]:
    """Return the quotient and the remainder of an index that is not negative."""
    if is_symbolic(by):
        return index // by, index % by
    if by == 1:
        return index, np.int32(0)
    # `//` and `%` take negative numbers too, for which JAX traces many operations more.
    return lax.div(index, np.int32(by)), lax.rem(index, np.int32(by))
