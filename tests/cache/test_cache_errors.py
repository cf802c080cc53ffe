"""Every mistake with a cache raises an error that states the rule, the value and the remedy."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha import cache
from flax_mha.cache import KVCache
from tests.support.arrays import ones

IDS = np.arange(4, dtype=np.int32)
Q = ones((2, 4, 6, 8))  # [B, T, N, H]
HELD = KVCache.empty((2,), 4, 6, 8)
STATE = {"layer": {"kv": HELD}}

Case = tuple[str, Callable[[], Any], type[Exception], str]


def cached(name: str, error: type[Exception], message: str, given: Any) -> list[Case]:
    """Return a case for each function that takes a collection of caches."""
    calls = {"fork": IDS, "truncate": 1, "reset": None, "free": None}
    return [
        (f"caches: {fn} of {name}",
         partial(getattr(cache, fn), given, *([] if more is None else [more])), error, message)
        for fn, more in calls.items()
    ]  # fmt: skip


VALUE: list[Case] = [
    ("keys than values", lambda: HELD.append(Q[:, :2], Q[:, :1]), ValueError,
     r"\[\*B, T, K, ·\].*, got \(2, 2, 6, 8\) and \(2, 1.*; initialize"),
    ("integers", lambda: HELD.append(Q, Q.astype(int)), TypeError,
     r"value must be floating point, got int32.*cast"),
    ("list", lambda: HELD.append([[1.0]], Q), TypeError, r"key must be an array, got list"),
    ("lengths", lambda: HELD.append(Q, Q, lengths=jnp.array([5, 1])), ValueError,
     r"lengths must be in 0 … 4, got 5; each counts"),
    ("lengths shape", lambda: HELD.append(Q, Q, lengths=3), ValueError,
     r"lengths must have shape \[\*B\] = \(2,\), got \(\); give one"),
    ("lengths dtype", lambda: HELD.append(Q, Q, lengths=ones(2)), TypeError,
     r"lengths must be integers, got float32; cast"),
    ("dtype", lambda: KVCache.empty((2,), 4, 6, 8, dtype="foo"), TypeError,
     r"data type 'foo' not understood"),
    ("dtype None", lambda: KVCache.empty((2,), 4, 6, 8, dtype=None), TypeError,
     r"dtype must be a floating dtype .* or int8 or float8_e4m3fn or float8_e5m2, got bool"),
]  # fmt: skip

ROWS: list[tuple[str, type[Exception], str, Any]] = [
    ("a mask", TypeError, r"rows must be integers, got bool; cast", jnp.array([True, False])),
    ("negative", ValueError, r"rows must be in 0 … 1, got -1; give indices", jnp.array([0, -1])),
    ("beyond", ValueError, r"rows must be in 0 … 1, got 2; give indices", [2]),
    ("one", ValueError, r"rows must have shape \[R\] = \(1,\), got \(\); give", 1),
    ("None", TypeError, r"rows must be integers, got object", None),
]  # fmt: skip

LENGTHS: list[tuple[str, type[Exception], str, Any]] = [
    ("negative", ValueError, r"lengths must be at least 0, got -1; give.*length - 1 to", -1),
    ("float", TypeError, r"lengths must be integers, got float64; cast", 1.9),
    ("None", TypeError, r"lengths must be integers, got object", None),
]  # fmt: skip

CASES: list[Case] = [
    *cached("no caches", ValueError, r"the cache of a layer, got one without; give variables",
            {"params": {"kernel": Q}}),
    *cached("None", ValueError, r"the cache of a layer, got one without", None),
    *VALUE,
    *[(f"fork: {name}", partial(HELD.fork, given), *error) for name, *error, given in ROWS],
    *[(f"caches, fork: {name}", partial(cache.fork, STATE, given), *error)
      for name, *error, given in ROWS],
    *[(f"truncate: {name}", partial(HELD.truncate, given), *error)
      for name, *error, given in LENGTHS],
    *[(f"caches, truncate: {name}", partial(cache.truncate, STATE, given), *error)
      for name, *error, given in LENGTHS],
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "message"), [pytest.param(*row, id=name) for name, *row in CASES]
)
def test_cache_mistake_raises_rule_value_and_remedy(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"(?s){message}") as raised:
        call()
    assert raised.type is error
