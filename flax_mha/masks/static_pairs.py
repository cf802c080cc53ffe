"""The pairs that a mask allows, computed while JAX traces a call.

A user's function of positions may allow few pairs. If nothing that it reads is traced, all pairs
are computed, so that kernels skip the empty tiles.
"""

from collections.abc import Callable

import jax
import numpy as np

from flax_mha.base.coordinates import Array, At
from flax_mha.masks.states import is_static

# The most pairs that are computed, about a second of NumPy for each operation, and at once.
MOST, _CHUNK = 2**26, 2**22


def static_pairs(
    allowed: Callable[[At], Array], q: Array | None, k: Array | None
) -> np.ndarray | None:
    """Return allowed(at) for positions of queries [*B|1, 1, T, 1] and of keys [*B|1, 1, 1, S].

    Return None for traced positions, functions that read the row or the head, and too many pairs.
    """
    if q is None or k is None or not is_static(q, k) or q.size * k.size > MOST:
        return None
    first = np.zeros([1] * q.ndim, np.int32)
    jaxpr = jax.make_jaxpr(lambda *at: allowed(At(*at)))(first, first, q, k).jaxpr
    read = [x for eqn in jaxpr.eqns for x in eqn.invars] + jaxpr.outvars
    if any(x is index for x in read for index in jaxpr.invars[:2]):
        return None
    step = max(1, _CHUNK // k.size)
    parts = []
    with jax.ensure_compile_time_eval():
        for start in range(0, q.shape[-2], step):
            rows = q[..., start : start + step, :]
            parts.append(np.asarray(allowed(At(first, first, rows, k))))
            if parts[0].shape[-2] < rows.shape[-2]:
                # All queries see the same keys.
                return parts[0]
    return np.concatenate(parts, -2)
