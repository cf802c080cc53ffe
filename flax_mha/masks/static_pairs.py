"""The pairs that a mask allows, computed while a call is traced.

Masks without tiles of their own, such as functions of positions, may allow few pairs, which only
their values tell. If nothing that they read is traced, the pairs are computed once, so that kernels
skip the tiles without pairs.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from flax_mha.base.coordinates import Array, At
from flax_mha.masks.states import is_static

# The most pairs that are computed, a second of NumPy for each operation; and at once.
MOST, _CHUNK = 2**26, 2**22
# The bits of the last tables, by the program and what it reads: at most 8 MiB each.
_KEPT: OrderedDict[Any, tuple[tuple[int, ...], np.ndarray]] = OrderedDict()
_TABLES = 8


def static_pairs(
    allowed: Callable[[At], Array], q: Array | None, k: Array | None
) -> np.ndarray | None:
    """Return allowed(at) for positions of queries [*B|1, 1, T, 1] and of keys [*B|1, 1, 1, S].

    Returns None if the positions are traced, if the function reads the row or the head, or for too
    many pairs.
    """
    if q is None or k is None or not is_static(q, k) or q.size * k.size > MOST:
        return None
    first = np.zeros([1] * q.ndim, np.int32)
    closed = jax.make_jaxpr(lambda *at: allowed(At(*at)))(first, first, q, k)
    jaxpr = closed.jaxpr
    read = [x for eqn in jaxpr.eqns for x in eqn.invars] + jaxpr.outvars
    if any(x is index for x in read for index in jaxpr.invars[:2]):
        return None
    if not _tells_all(jaxpr):
        return _compute(allowed, first, q, k)
    arrays = [np.asarray(x) for x in (*closed.consts, q, k)]
    # Functions that are made anew for each call have equal programs.
    key = (str(jaxpr), *((x.shape, str(x.dtype), x.tobytes()) for x in arrays))
    found = _KEPT.pop(key, None)
    if found is None:
        table = _compute(allowed, first, q, k)
        found = table.shape, np.packbits(table)
    _KEPT[key] = found
    while len(_KEPT) > _TABLES:
        _KEPT.popitem(last=False)
    shape, bits = found
    return np.unpackbits(bits, count=int(np.prod(shape))).reshape(shape).astype(bool)


def _tells_all(jaxpr: Any) -> bool:
    """Return True if the text of a program tells everything it computes.

    The text leaves out the arrays of programs inside it and the code of Python functions.
    """
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for x in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(x, "jaxpr", x)
                if hasattr(inner, "eqns"):
                    if getattr(x, "consts", ()) or not _tells_all(inner):
                        return False
                elif callable(x) and not isinstance(x, type | Mesh | AbstractMesh):
                    return False
    return True


def _compute(allowed: Callable[[At], Array], first: np.ndarray, q: Any, k: Any) -> np.ndarray:
    """Return the table, computed for some queries at a time."""
    step = max(1, _CHUNK // k.size)
    parts = []
    with jax.ensure_compile_time_eval():
        for start in range(0, q.shape[-2], step):
            some = q[..., start : start + step, :]
            parts.append(np.asarray(allowed(At(first, first, some, k))))
            if parts[0].shape[-2] < some.shape[-2]:
                # The same for all queries.
                return parts[0]
    return np.concatenate(parts, -2)
