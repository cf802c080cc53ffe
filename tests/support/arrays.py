"""JAX arrays made by NumPy.

`jnp.zeros` compiles a program for each shape, which takes longer than most tests. Module-level
arrays would all be compiled before the first test runs.
"""

from typing import Any

import jax
import numpy as np


def zeros(shape: Any, dtype: Any = np.float32) -> jax.Array:
    """Return zeros on the default device, with int as int32."""
    return jax.device_put(np.zeros(shape, np.int32 if dtype is int else dtype))


def ones(shape: Any, dtype: Any = np.float32) -> jax.Array:
    """Return ones on the default device, with int as int32."""
    return jax.device_put(np.ones(shape, np.int32 if dtype is int else dtype))
