"""Caches of keys and values for decoding.

>>> cache = KVCache.empty((2,), slots=16, num_kv_heads=4, head_dim=8)
>>> out, cache = cache.extend(q, k, v)  # any number of tokens: a prompt, then one at a time

With `decode=True`, a layer keeps its cache in the collection `cache`. `fork`, `truncate`, `reset`
and `free` apply the methods of the same names to all caches of such a collection.
"""

from flax_mha.cache.collection import fork, free, reset, truncate
from flax_mha.cache.key_values import KeyValues
from flax_mha.cache.kv_cache import CacheConfig, Encoded, KVCache

__all__ = [
    "CacheConfig", "Encoded", "KVCache", "KeyValues", "fork", "free", "reset", "truncate",
]  # fmt: skip
__dir__ = __all__.copy
