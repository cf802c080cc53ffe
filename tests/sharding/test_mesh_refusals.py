"""Calls that rules and meshes do not allow are refused before compilation."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_mha import KVCache, MultiHeadAttention, dot_product_attention, sharding
from tests.support.arrays import ones
from tests.support.meshes import BOTH, FOUR, KEY, KINDS, MIXED, X, changed, on


def attend(S: int, K: int, kernel: str, spec: P | None = None) -> Any:
    """Call attention for 64 queries of 8 heads."""
    q = ones((2, 64, 8, 4))
    if spec is not None:
        q = jax.device_put(q, NamedSharding(jax.sharding.get_mesh(), spec))
    k = ones((2, S, K, 4))
    call = functools.partial(dot_product_attention, kernel=kernel)
    return jax.eval_shape(call, q, k, k)


def extend(slots: int, **call: Any) -> Any:
    q = ones((4, 1, 4, 8))
    held = KVCache.empty((4,), slots, 4, 8)
    return jax.eval_shape(functools.partial(held.extend, **call), q, q, q)


def apply(heads: int = 8) -> Any:
    layer = MultiHeadAttention(heads, qkv_features=48 if heads == 6 else None)
    return jax.eval_shape(layer.apply, jax.eval_shape(layer.init, KEY, X), X)


# Rules, the shape of the mesh, the call, and the error.
LAYERS: dict[str, tuple[Any, tuple[int, ...], Callable[[], Any], str]] = {
    "an axis that the mesh lacks": (
        changed(heads="tensor"), (2, 4), apply,
        r"rule \('heads', 'tensor'\) names the mesh axis \['tensor'\], and the mesh has "
        r"\{'data': 2, 'model': 4\}; make it with that axis",
    ),
    "heads": (
        sharding.RULES, (1, 8), functools.partial(apply, 6),
        r"'heads' counts 6, which does not divide over the 8 devices of the mesh axis 'model'; "
        r"choose a multiple of 8, or another axis",
    ),
    "rows": (
        sharding.RULES, (8, 1), apply, r"'batch' counts 4, which does not divide over the 8",
    ),
    "twice": (
        changed(heads="data"), (2, 4), apply,
        r"'heads' is to be sharded over 'data', which another axis of the same array",
    ),
    "key/value heads over another axis": (
        changed(kv_heads="data", batch=None), (2, 4), apply,
        r"heads are sharded over 'model' and key/value heads over 'data'; give both the same",
    ),
}  # fmt: skip
CALLS: dict[str, tuple[str, Any, tuple[int, ...], Callable[[], Any], str]] = {
    "key/value heads over the last axis": (
        "Auto", changed(heads=("model", "group"), kv_heads="group"), (1, 2, 4),
        lambda: attend(64, 4, "auto"),
        r"over \('model', 'group'\) and key/value heads over "
        r"'group'; give both the same rule, or key/value heads the first axes",
    ),
    "slots": (
        "Auto", changed(cache_length="group"), (2, 2, 2), lambda: extend(15),
        r"'cache_length' counts 15, which does not divide",
    ),
    "a normalizer without sums": (
        "Auto", changed(cache_length="group"), (2, 2, 2),
        lambda: extend(16, normalizer="sigmoid"),
        r"must be 'softmax' to merge the slots of several",
    ),
    "ulysses: heads": (
        "Auto", FOUR, (2, 4), lambda: attend(64, 4, "ulysses"),
        "8 devices .* 8 query heads and 4 key/value",
    ),
    "usp: heads over the inner axis": (
        "Auto", BOTH, (2, 4), lambda: attend(64, 2, "usp"),
        "4 devices .* 8 query heads and 2 key/value",
    ),
    "usp: one axis of positions": (
        "Auto", FOUR, (2, 4), lambda: attend(64, 8, "usp"),
        r"needs .* \('length', .*, got 'model'",
    ),
    "ring: keys, though replicated": (
        "Explicit", (), (2, 4), lambda: attend(66, 8, "ring", P(None, "model")),
        "66 keys do not divide over 4 devices",
    ),
    "usp: keys, though replicated": (
        "Explicit", (), (2, 4), lambda: attend(65, 8, "usp", P(None, ("data", "model"))),
        "65 keys do not divide over 2 devices",
    ),
    "an unknown strategy": (
        "Auto", FOUR, (2, 4), lambda: attend(64, 8, "round:blockwise"),
        "alone or as in 'ring:blockwise'",
    ),
    "an unknown kernel": (
        "Auto", FOUR, (2, 4), lambda: attend(64, 8, "ring:fast"),
        "kernel must be 'auto' or one of",
    ),
}  # fmt: skip
ROWS = {
    **{f"{name}, {kind}": (kind, *LAYERS[name]) for name in LAYERS for kind in (*KINDS, *MIXED)},
    **CALLS,
}


@pytest.mark.parametrize("name", ROWS)
def test_misuse_raises(name: str) -> None:
    kind, rules, shape, call, message = ROWS[name]
    with on(kind, rules, shape), pytest.raises(ValueError, match=message):
        call()
