"""The meaning of a layer's call: which keys its queries attend to, and which cache it keeps."""

from typing import Any, TypeAlias

import jax

from flax_mha.base import shapes
from flax_mha.cache.key_values import KeyValues
from flax_mha.cache.kv_cache import CacheConfig, Encoded, KVCache
from flax_mha.cache.slots import positions_from

# What a layer's argument `kv` takes.
KVLike: TypeAlias = KeyValues | Encoded | tuple[Any, Any]
# What the functions of `layer.core` take as `cache`: see `project_heads`.
CacheLike: TypeAlias = KVCache | CacheConfig | KeyValues | Encoded | None


def resolve_call(
    kv: KVLike | None, x_q: jax.Array, x_k: jax.Array | None, x_v: jax.Array | None,
    config: CacheConfig | None, cache: KVCache | None, makes_room: bool = False,
) -> tuple[jax.Array | None, jax.Array | None, CacheLike]:  # fmt: skip
    """Return the inputs of keys and values, and the `cache` of `project_heads`.

    The arguments and the cache that exists decide the meaning of a call, and only here. The inputs
    are None if they are the queries' or if keys and values exist already. `config` is the format of
    a new cache, None for a layer that does not decode. `cache` is the one of earlier calls.
    """
    if kv is not None and (x_k is not None or x_v is not None):
        raise ValueError(
            "kv are keys and values themselves, got inputs_k or inputs_v as well; give one or the "
            "other"
        )
    encoded = kv if isinstance(kv, Encoded) else None
    if encoded is not None:
        x_k, x_v = encoded.inputs_k, encoded.inputs_v
        makes_room |= encoded.makes_room
    shapes.check_inputs(x_q, x_k, x_v)
    x_v = x_k if x_v is None else x_v
    if kv is not None and encoded is None:
        if not isinstance(kv, KeyValues | Encoded):
            k, v = kv
            kv = KeyValues(k, v)
        return None, None, kv
    if encoded is not None and x_k is None and cache is None:
        raise ValueError(
            "Encoded() stands for keys and values that a layer that decodes has kept, got none; "
            "give Encoded(inputs_k) first"
        )
    if config is None:
        return x_k, x_v, None
    if appends(cache) or (cache is None and encoded is None):
        if encoded is not None:
            raise ValueError(
                "the layer's cache holds the tokens of earlier calls, got kv=Encoded(...); give "
                "an encoder's output to a layer of its own"
            )
        if x_k is not None and x_k.shape[-2] != x_q.shape[-2]:
            raise ValueError(
                f"a layer that decodes appends a key for each query, got {x_q.shape[-2]} queries "
                f"and {x_k.shape[-2]} keys; give kv=cache.Encoded(inputs_k) to keep an encoder's "
                f"keys"
            )
        return x_k, x_v, config if cache is None else cache
    if x_k is None:
        return None, None, cache
    if encoded is None:
        raise ValueError(
            "the layer's cache holds an encoder's keys and values, got inputs_k; give "
            "kv=cache.Encoded(inputs_k) to replace them, or leave inputs_k out"
        )
    queries = None if cache is None else cache.queries
    return x_k, x_v, Encoded(makes_room=makes_room, queries=queries)


def appends(cache: CacheLike) -> bool:
    """Return True if the tokens of the call are appended to the cache, or to one that it makes."""
    return isinstance(cache, CacheConfig) or (isinstance(cache, KVCache) and cache.queries is None)


def has_own_keys(cache: CacheLike) -> bool:
    """Return True for keys of another sequence or layer, instead of the queries' own tokens."""
    return cache is not None and not appends(cache)


def next_positions(cache: CacheLike, T: int) -> Any:
    """Return the positions of the next T queries, int32 [*B, T]; None for 0 … T−1."""
    if isinstance(cache, KeyValues):
        return cache.q_positions
    if isinstance(cache, Encoded) and cache.queries is not None:
        return positions_from(cache.queries, T)
    return cache.next_positions(T) if isinstance(cache, KVCache) else None


def projected(
    x_q: jax.Array, x_k: jax.Array | None, x_v: jax.Array | None, cache: CacheLike
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return the inputs that keys and values are computed from, None if they exist already."""
    return (x_q, x_q) if x_k is None and not has_own_keys(cache) else (x_k, x_v)
