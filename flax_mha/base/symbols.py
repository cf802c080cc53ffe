"""Sizes that can be symbolic dimensions of `jax.export`, which get values at run time."""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax


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
    return (jnp if is_symbolic(size) else np).arange(size, dtype=np.int32)


def divide(index: Any, by: Any) -> tuple[Any, Any]:
    """Return the quotient and the remainder of an index ≥ 0."""
    if is_symbolic(by):
        return index // by, index % by
    if by == 1:
        return index, np.int32(0)
    # `//` and `%` take many more operations, for negative numbers.
    return lax.div(index, np.int32(by)), lax.rem(index, np.int32(by))
