"""CPUs: the dtype that matmuls compute in."""

import jax.numpy as jnp

from flax_mha.base import symbols


def computes_in_bfloat16(dtype: jnp.dtype, T: int, S: int) -> bool:
    """Return True if matmuls on a CPU stay in bfloat16, with at least 64 queries and keys.

    They are faster, measured on a CPU with AMX, and the rounding errors of the weights average out
    over enough keys.
    """
    short = any(symbols.at_most(length, 63) for length in (T, S))
    return dtype == jnp.bfloat16 and not short
