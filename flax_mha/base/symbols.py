"""Sizes that may be symbols of `jax.export`, known when the program is called."""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np


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
