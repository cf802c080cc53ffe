"""Caches of keys and values for decoding.

>>> cache = KVCache.empty((2,), slots=16, num_kv_heads=4, head_dim=8)
>>> out, cache = cache.extend(q, k, v)  # any number of tokens: a prompt, then one at a time

With `decode=True`, a layer keeps its cache in the collection `cache`. `fork`, `truncate`, `reset`
and `free` apply the methods of the same names to all caches of such a collection.
"""

from flax_mha.cache.collection import fork as fork
from flax_mha.cache.collection import free as free
from flax_mha.cache.collection import reset as reset
from flax_mha.cache.collection import truncate as truncate
from flax_mha.cache.key_values import KeyValues as KeyValues
from flax_mha.cache.kv_cache import CacheConfig as CacheConfig
from flax_mha.cache.kv_cache import Encoded as Encoded
from flax_mha.cache.kv_cache import KVCache as KVCache
from flax_mha.cache.kv_cache import as_cache_config as as_cache_config

__all__ = [
    "CacheConfig", "Encoded", "KVCache", "KeyValues", "as_cache_config", "fork", "free", "reset",
    "truncate",
]  # fmt: skip
__dir__ = __all__.copy
