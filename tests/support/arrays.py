"""JAX arrays made by NumPy.

`jnp.zeros` compiles a program for each shape, which takes longer than most tests. Module-level
arrays would all be compiled before the first test runs.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from tests.support.oracle import random_like


def zeros(shape: Any, dtype: Any = np.float32) -> jax.Array:
    """Return zeros on the default device, with int as int32."""
    return jax.device_put(np.zeros(shape, np.int32 if dtype is int else dtype))


def ones(shape: Any, dtype: Any = np.float32) -> jax.Array:
    """Return ones on the default device, with int as int32."""
    return jax.device_put(np.ones(shape, np.int32 if dtype is int else dtype))


def random_variables(module: nn.Module, *inputs: Any, **call: Any) -> Any:
    """Return random values for the variables that a module creates in this call."""
    return random_like(jax.eval_shape(partial(module.init, **call), jax.random.key(0), *inputs))
