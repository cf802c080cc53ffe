"""Keys and values of the tokens so far, for decoding.

>>> cache = KVCache.empty((2,), slots=16, num_kv_heads=4, head_dim=8)
>>> out, cache = cache.extend(q, k, v)  # any number of tokens: a prompt, then one at a time

The layer keeps one in the collection `cache` under `decode=True`; `fork`, `truncate`, `reset` and
`free` do to all caches of such a collection what the methods do to one.
"""

from flax_mha.cache.collection import fork as fork
from flax_mha.cache.collection import free as free
from flax_mha.cache.collection import reset as reset
from flax_mha.cache.collection import truncate as truncate
from flax_mha.cache.config import CacheConfig as CacheConfig
from flax_mha.cache.config import as_cache_config as as_cache_config
from flax_mha.cache.extended import Extended as Extended
from flax_mha.cache.kv_cache import KVCache as KVCache
from flax_mha.cache.storage import Memory as Memory
