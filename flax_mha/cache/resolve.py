"""The keys and values that a layer attends to: of this call, a cache, or another layer."""

from typing import Any, TypeAlias

import jax

from flax_mha import masks
from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import Array
from flax_mha.cache.config import CacheConfig
from flax_mha.cache.kv_cache import KVCache
from flax_mha.cache.sources import Encoded, KeyValue, Shared, Source
from flax_mha.cache.storage import Memory

Given: TypeAlias = Shared | Encoded | tuple[Any, Any]


def resolve_call(
    kv: Given | None, x_q: jax.Array, x_k: jax.Array | None, x_v: jax.Array | None,
    config: CacheConfig | None, kept: KVCache | Memory | None, makes_room: bool = False,
) -> tuple[jax.Array | None, jax.Array | None, Source | None]:  # fmt: skip
    """Return the inputs of keys and values, and the source of those that need none.

    The meaning of a layer's call is decided here alone: by the arguments that are given, and the
    cache that exists. The inputs are None for those of the queries, or if a source has the keys and
    values. `config` is the format of a new cache, None for a layer that does not decode, `kept` the
    cache of earlier calls, and `makes_room` True in a call that only makes one, as `init` does.
    """
    if kv is not None and (x_k is not None or x_v is not None):
        raise ValueError(
            "kv are keys and values themselves, got inputs_k or inputs_v beside them; give one or "
            "the other"
        )
    encoded = kv if isinstance(kv, Encoded) else None
    if encoded is not None:
        x_k, x_v = encoded.inputs_k, encoded.inputs_v
        makes_room |= encoded.makes_room
    shapes.check_inputs(x_q, x_k, x_v)
    x_v = x_k if x_v is None else x_v
    if kv is not None and encoded is None:
        return None, None, _as_shared(kv)
    if kv is not None and x_k is None and kept is None:
        raise ValueError(
            "Encoded() stands for keys and values that a layer that decodes has kept, got none; "
            "give Encoded(inputs_k) first"
        )
    if config is None:
        return x_k, x_v, None
    cache = config if kept is None and kv is None else kept
    if cache is not None and cache.appends:
        return x_k, x_v, _own_tokens(encoded, x_q, x_k, cache)
    if x_k is None:
        return None, None, kept
    if kv is None:
        raise ValueError(
            "the layer's cache holds an encoder's keys and values, got inputs_k; give "
            "kv=cache.Encoded(inputs_k) to replace them, or leave inputs_k out"
        )
    first = None if makes_room else 0
    return x_k, x_v, Memory(None, None, length=first if kept is None else kept.length)


def projected(
    x_q: jax.Array, x_k: jax.Array | None, x_v: jax.Array | None, source: Source | None
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return the inputs that keys and values are computed from, None if the source has them."""
    return (x_q, x_q) if x_k is None and not as_source(source).is_given else (x_k, x_v)


def as_source(cache: Any) -> Source:
    """Return the argument `cache` of `core.attention` as a source: None is the call's inputs."""
    if cache is None:
        return Source()
    if isinstance(cache, Source):
        return cache
    raise TypeError(
        f"cache must be a KVCache, a Memory, a CacheConfig, keys and values of another layer, "
        f"or None, got {checks.describe(cache)}; give one of these"
    )


def _own_tokens(kv: Encoded | None, x_q: jax.Array, x_k: jax.Array | None, cache: Source) -> Source:
    """Return the cache that a call's tokens are appended to, one key for each query."""
    if kv is not None:
        raise ValueError(
            "the layer's cache holds the tokens of earlier calls, got kv=Encoded(...); give "
            "an encoder's output to a layer of its own"
        )
    if x_k is not None and x_k.shape[-2] != x_q.shape[-2]:
        raise ValueError(
            f"a layer that decodes appends a key for each query, got {x_q.shape[-2]} queries and "
            f"{x_k.shape[-2]} keys; give kv=cache.Encoded(inputs_k) to keep an encoder's keys"
        )
    return cache


def _as_shared(kv: Any) -> Shared:
    """Return the argument `kv` as keys and values of another layer."""
    if isinstance(kv, tuple) and len(kv) == 2:
        for name, x in zip(("keys", "values"), kv, strict=True):
            checks.floating(f"kv's {name}", x)
        return KeyValue(*kv)
    if isinstance(kv, Shared):
        return kv
    raise TypeError(
        f"kv must be the kv that a layer returns with return_kv=True, a pair (keys, values), or "
        f"cache.Encoded(inputs_k), got {checks.describe(kv)}; give one of these"
    )


def check_shared(kv: Any, q: jax.Array, Hv: int | None, mask: Any, order: Array | None) -> None:
    """Check that another layer's keys and values fit this layer's queries [*B, T, N, H]."""
    *B, _, N, H = q.shape
    k, v = kv.key.shape, kv.value.shape
    fits = len(k) > 2 and k[:-3] == tuple(B) and k[:-1] == v[:-1] and k[-1] == H and not N % k[-2]
    if not fits or v[-1] != (Hv or v[-1]):
        raise ValueError(
            f"kv must be keys [*B, S, K, H] and values [*B, S, K, Hv] with K a divisor of N, and "
            f"H and Hv as in this layer, whose queries [*B, T, N, H] are {q.shape} and Hv = "
            f"{Hv or 'any'}; got {k} and {v}; give both layers the same head_dim and v_head_dim"
        )
    if not kv.has_slots and kv.ordered != (order is not None):
        raise ValueError(
            f"order must be given to both layers, the one that returns kv and the one that "
            f"takes it, or to none; got it for one, and keys of {k[-3]} tokens"
        )
    lookback = None if mask is None else masks.as_mask(mask).max_lookback()
    if kv.window is not None and (lookback is None or lookback > kv.window):
        raise ValueError(
            f"kv are from a ring buffer with a window of {kv.window}, so this layer's mask must "
            f"see no earlier tokens, got mask={mask}; give masks.Window(W, 0) with W at most "
            f"{kv.window}"
        )
