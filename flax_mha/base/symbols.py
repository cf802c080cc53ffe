"""Sizes that can be symbolic dimensions of `jax.export`, which get values at run time."""

from typing import Any

import jax
import jax.export
import numpy as np


def is_symbolic(*sizes: Any) -> bool:
    """Tell if any size is symbolic."""
    return any(jax.export.is_symbolic_dim(size) for size in sizes)


def at_most(size: Any, most: Any) -> bool:
    """Tell if size ≤ most for all values of their symbols."""
    try:
        return bool(size <= most)
    except jax.errors.InconclusiveDimensionOperation:
        return False


def count_up(size: Any) -> Any:
    """Return int32 0 … size − 1, a NumPy array unless the size is symbolic."""
    if is_symbolic(size):
        return jax.lax.iota(np.int32, size)
    return np.arange(size, dtype=np.int32)
