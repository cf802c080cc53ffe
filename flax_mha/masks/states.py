"""The state of a mask on a tile of the scores, and its algebra."""

from typing import Any

import numpy as np

from flax_mha.base.coordinates import Array, numpy_of

# In this order `&` is the minimum, `|` the maximum, `~` 2 − x.
EMPTY, PARTIAL, FULL = 0, 1, 2


def tile_state(some: Any, every: Any) -> Array:
    """Return EMPTY, PARTIAL or FULL from two bools: some pairs may attend, and all may."""
    return some.astype(np.int8) + every.astype(np.int8)


def both(x: Array, y: Array) -> Array:
    """Return the tile state of x & y."""
    return numpy_of(x, y).minimum(x, y)


def either(x: Array, y: Array) -> Array:
    """Return the tile state of x | y."""
    return numpy_of(x, y).maximum(x, y)


def is_static(*arrays: Array) -> bool:
    """Tell if all arrays are static, not traced."""
    return numpy_of(*arrays) is np
