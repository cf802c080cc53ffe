"""The verdict of a mask on a whole tile, and its algebra."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from flax_mha.base.coordinates import Array

# In this order `&` is the minimum, `|` the maximum, `~` 2 − x.
EMPTY, PARTIAL, FULL = 0, 1, 2


def tile_state(some: Any, every: Any) -> Array:
    """Return EMPTY, PARTIAL or FULL, given if some and if all pairs of a tile may attend."""
    return some.astype(np.int8) + every.astype(np.int8)


def both(x: Array, y: Array) -> Array:
    """Return the verdict of two masks together, the least of EMPTY, PARTIAL and FULL."""
    return np.minimum(x, y) if is_static(x, y) else jnp.minimum(x, y)


def either(x: Array, y: Array) -> Array:
    """Return the verdict of either of two masks, the greatest."""
    return np.maximum(x, y) if is_static(x, y) else jnp.maximum(x, y)


def is_static(*arrays: Array) -> bool:
    """Return True if all arrays are known before tracing."""
    return all(isinstance(x, np.ndarray | np.generic) for x in arrays)
