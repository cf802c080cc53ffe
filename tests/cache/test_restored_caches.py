"""Caches restored from plain dicts, and values that are no caches."""

from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_mha.cache import KVCache
from flax_mha.cache.collection import restore

PLAIN = KVCache.empty((2,), 6, 2, 4)
CACHES: dict[str, KVCache] = {
    "plain": PLAIN,
    "int8": KVCache.empty((2,), 6, 2, 4, 3, dtype=jnp.int8),
    "float8": KVCache.empty((2,), 6, 2, 4, dtype="float8_e5m2"),
    "ring": KVCache.empty((), 6, 2, 4, window=3),
    "memory": KVCache.of_encoder(*[jnp.ones((2, 6, 2, 4))] * 2, "bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("name", CACHES)
def test_saved_caches_are_restored(name: str) -> None:
    """Caches come back from plain dicts, of NumPy too."""
    cache = CACHES[name]
    assert restore(cache) is cache
    plain = flax.serialization.to_state_dict(cache)
    for saved in (
        plain,
        flax.serialization.msgpack_restore(flax.serialization.to_bytes(cache)),
    ):
        got = restore(saved, 3 if name in ("ring", "memory") else None)
        assert type(got) is type(cache)
        for x, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(cache), strict=True):
            assert isinstance(x, jax.Array)
            assert x.dtype == wanted.dtype
            np.testing.assert_array_equal(x, wanted)


def saved(name: str = "plain", **changes: Any) -> dict[str, Any]:
    return flax.serialization.to_state_dict(CACHES[name]) | changes


NOT_A_CACHE: dict[str, Any] = {
    "None": None,
    "an array": np.ones(3),
    "Flax's": dict.fromkeys(("cached_key", "cached_value", "cache_index"), np.ones((2, 6, 2, 4))),
    "a collection": {"layer": {"kv": PLAIN}},
    "nothing": {},
    "more": saved(other=1),
    "less": {"key": PLAIN.key, "value": PLAIN.value, "length": PLAIN.length},
}
WRONG: dict[str, tuple[Any, int | None]] = {
    "lists": (saved(key=[1.0], value=2.0), None),
    "no values": (saved(value=None), None),
    "no keys": (PLAIN.replace(key=None), None),
    "rank": (saved(key=np.ones((2, 6)), value=np.ones((2, 6))), None),
    "slots": (saved(value=np.ones((2, 2, 5, 4), np.float32)), None),
    "dtypes": (saved(value=np.ones((2, 2, 6, 4), np.float16)), None),
    "lengths": (saved(length=np.zeros(3, np.int32)), None),
    "floating lengths": (saved(length=np.zeros(2, np.float32)), None),
    "no scales": (saved("int8", key_scale=None), None),
    "no scales of float8": (saved("float8", value_scale=None), None),
    "scales of floats": (saved(key_scale=np.ones((2, 2, 6), np.float32)), None),
    "a ring": (saved("ring"), None),
    "no ring": (saved(), 3),
    "a small ring": (saved("ring"), 6),
    "queries of floats": (saved("memory", queries=np.zeros(2, np.float32)), None),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_A_CACHE)
def test_other_values_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=r"must be a flax_mha.cache.KVCache, or.*got .*start from"):
        restore(NOT_A_CACHE[name])


@pytest.mark.parametrize("name", WRONG)
def test_caches_that_lack_arrays_are_refused(name: str) -> None:
    cache, window = WRONG[name]
    with pytest.raises(ValueError, match=r"must have keys and values .* got .*; restore all"):
        restore(cache, window)
