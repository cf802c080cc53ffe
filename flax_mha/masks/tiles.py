"""What a mask says of a whole tile, and how the answers of several masks join."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from flax_mha.grid import Array

# In this order `&` is the minimum, `|` the maximum, `~` 2 − x.
EMPTY, PARTIAL, FULL = 0, 1, 2


def judge(some: Any, every: Any) -> Array:
    """EMPTY, PARTIAL or FULL from whether some and whether all pairs of a tile may attend."""
    return some.astype(np.int8) + every.astype(np.int8)


def both(x: Array, y: Array) -> Array:
    """What two masks say together: of EMPTY, PARTIAL and FULL the least."""
    return np.minimum(x, y) if known(x, y) else jnp.minimum(x, y)


def either(x: Array, y: Array) -> Array:
    """What either of two masks says: the greatest."""
    return np.maximum(x, y) if known(x, y) else jnp.maximum(x, y)


def known(*arrays: Array) -> bool:
    """Whether all are known before tracing."""
    return all(isinstance(x, np.ndarray | np.generic) for x in arrays)
