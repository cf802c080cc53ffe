"""Caches as variables of a model: the collection `cache`.

A self-attention layer keeps its `KVCache` under `kv`, and a cross-attention layer the one with the
encoder's keys under `memory`. Layers under `nn.scan` stack theirs along a leading axis.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from flax_mha import sharding
from flax_mha.base import checks
from flax_mha.cache.kv_cache import KVCache
from flax_mha.cache.slots import has_scales
from flax_mha.kernels.call.stored import OfLayer, is_part
from flax_mha.sharding import LogicalNames

# The names of a layer's cache in the collection.
NAMES = frozenset(("kv", "memory"))
# A tree of caches, such as `variables['cache']` or all variables.
Collection = TypeVar("Collection")
# The arrays of a cache.
_ARRAYS = frozenset(KVCache.__dataclass_fields__) - {"window"}


def constrain_cache(cache: KVCache) -> KVCache:
    """Shard a cache by the logical axis rules, over the batch and the key/value heads."""

    def constrain(x: jax.Array, names: LogicalNames) -> Any:
        # Leading batch axes have no name.
        all_names = ((None,) * x.ndim + names)[len(names) :]
        return sharding.name(sharding.constrain(x, all_names), all_names)

    return cache.map_by_names(constrain)


def restore(cache: Any, window: int | None = None) -> KVCache:
    """Return a layer's cache, also from the plain dict that it was saved as.

    Args:
      cache: a `KVCache`, or its arrays by name, as msgpack, `flax.serialization.to_state_dict`, and
        the states and pure dicts of nnx have them.
      window: the window of the layer's ring buffer, which is not saved; None without one.
    """
    if isinstance(cache, Mapping) and frozenset(cache) == _ARRAYS:
        # Variables of nnx, which is slow to import, have `get_value`.
        arrays = {name: getattr(x, "get_value", lambda x=x: x)() for name, x in cache.items()}
        window = getattr(cache["key"], "window", window)
        window = window if arrays["queries"] is None else None
        cache = jax.tree.map(jnp.asarray, KVCache(**arrays, window=window))
    if not isinstance(cache, KVCache):
        kind = f"a dict of {[*cache]}" if isinstance(cache, Mapping) else checks.describe(cache)
        raise TypeError(
            f"a layer's cache must be a flax_mha.cache.KVCache, or a dict of its arrays, got "
            f"{kind}; start from an empty one, of init or init_cache"
        )
    arrays = {name: (x.shape, x.dtype) for name, x in vars(cache).items() if hasattr(x, "shape")}
    (shape, dtype), (other, _) = (arrays.get(name, ((), None)) for name in ("key", "value"))
    rows, window = (shape[:-3], jnp.int32), cache.window
    expected = {"key": (shape, dtype), "value": ((*shape[:-1], *other[-1:]), dtype), "length": rows}
    if "key" in arrays and has_scales(dtype):
        expected |= dict.fromkeys(("key_scale", "value_scale"), (shape[:-1], jnp.float32))
    if window is not None:
        expected["written"] = rows
    if cache.queries is not None:
        expected["queries"] = rows
    if arrays != expected or len(shape) < 3 or (window is not None and window >= shape[-2]):
        raise ValueError(
            f"a layer's cache must have keys and values [*B, K, S, ·] of one dtype, int32 lengths "
            f"[*B], float32 scales [*B, K, S] if of 8 bits, in a ring buffer `written` [*B] and "
            f"more slots than the window, and `queries` [*B] for an encoder's keys, got {arrays} "
            f"and a window of {window}; restore all arrays of a cache, into a layer with the same "
            f"mask and CacheConfig"
        )
    return cache


def find_cache(variables: Mapping[str, Any], window: int | None) -> KVCache:
    """Return the one cache among the variables of a layer, restored with the layer's window."""
    names = NAMES & {*variables}
    if len(names) != 1:
        raise TypeError(
            f"a layer's collection 'cache' must have one of {sorted(NAMES)}, got "
            f"{sorted(variables)}; start from an empty one, which init with decode=True returns"
        )
    (name,) = names
    cache = restore(variables[name], window)
    if cache.variable != name:
        raise TypeError(
            f"a layer's cache must be under the name kv, or memory for an encoder's keys, got one "
            f"for {cache.variable} under {name}; restore it under its own name"
        )
    return cache


def has_slots(collection: Any) -> bool:
    """Return True if all caches are `KVCache`, not plain dicts to be restored."""
    leaves = jax.tree.leaves(collection, is_leaf=_is_cache)
    return not any(isinstance(x, Mapping) for x in leaves)


def of_layer(collection: Collection, layer: jax.Array) -> Collection:
    """Return one layer's part of stacked caches.

    Its large arrays are `OfLayer`, which the layer writes in place: a scan over the arrays of the
    layers would copy the whole cache (7,648 MiB for a step of 1,503 MiB on a v5e).
    """

    def part(x: Any) -> Any:
        if not isinstance(x, KVCache):
            return x[layer]
        large = x.key.ndim - 1
        return jax.tree.map(lambda y: OfLayer(y, layer) if y.ndim >= large else y[layer], x)

    return jax.tree.map(part, collection, is_leaf=lambda x: isinstance(x, KVCache))


def to_stack(collection: Collection, stack: Collection, layer: jax.Array) -> Collection:
    """Return the stacked caches after a layer's call, whose part came from `of_layer`."""

    def whole(new: Any, old: jax.Array) -> jax.Array:
        if is_part(new):
            return sharding.like(new.stack, old)
        part = jax.lax.dynamic_index_in_dim(old, layer, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(old, sharding.like(new, part), layer, 0)

    return jax.tree.map(whole, collection, stack, is_leaf=is_part)


def fork(collection: Collection, rows: jax.Array) -> Collection:
    """Return the collection with some rows of the batch, by `KVCache.fork` of each cache.

    Args:
      collection: a model's collection `cache`, or all its variables; only caches change.
      rows: int [R], indices into the last axis of *B. R can differ from the current number of rows.
    """
    return _map("fork", lambda cache: cache.fork(rows), collection)


def truncate(collection: Collection, lengths: jax.Array | int) -> Collection:
    """Return the collection with at most the first `lengths` tokens of each row.

    `lengths` is int, or int [*B]. See `fork` for the collection, and `KVCache.truncate`.
    """
    return _map("truncate", lambda cache: cache.truncate(lengths), collection)


def reset(collection: Collection) -> Collection:
    """Return the collection with empty caches. An encoder's keys stay, and queries count from 0."""
    return _map("reset", lambda cache: cache.truncate(0), collection)


def free(collection: Any) -> jax.Array:
    """Return the number of tokens that each row has room for in all layers, int32 [rows].

    Raises:
      ValueError, TypeError: if no layer has a cache of self-attention.
    """
    caches = [x for x in _caches("free", collection) if x.queries is None]
    if not caches:
        raise ValueError(
            "free needs a collection with the cache of a self-attention layer, got none; give "
            "variables['cache'] of a model initialized with decode=True"
        )
    room = (x.free() for x in caches)
    # The layers of a scan are the leading axes.
    return functools.reduce(jnp.minimum, (x.min(range(x.ndim - 1)) for x in room))


def _map(name: str, fn: Callable[[KVCache], KVCache], collection: Any) -> Any:
    """Apply fn to all caches of a collection, for the public function `name`."""
    _caches(name, collection)

    def apply(x: Any) -> Any:
        new = fn(restore(x)) if _is_cache(x) else x
        if not _is_cache(x) or isinstance(x, KVCache) or not hasattr(x["key"], "replace"):
            return new
        return {name: variable.replace(vars(new)[name]) for name, variable in x.items()}

    return jax.tree.map(apply, collection, is_leaf=_is_cache)


def _caches(name: str, collection: Any) -> list[KVCache]:
    """Return the caches of a collection, for the public function `name`."""
    if not isinstance(collection, Mapping | list | tuple):
        raise TypeError(
            f"{name} needs the collection of a model's caches, got {type(collection).__name__}; "
            f"give variables['cache'], or call the method of a KVCache"
        )
    leaves = jax.tree.leaves(collection, is_leaf=_is_cache)
    caches: list[KVCache] = [restore(x) for x in leaves if _is_cache(x)]
    if not caches:
        raise ValueError(
            f"{name} needs a collection with the cache of a layer, got one of {[*collection]}; "
            f"give variables['cache'] of a model initialized with decode=True"
        )
    return caches


def _is_cache(x: Any) -> bool:
    return isinstance(x, KVCache) or (isinstance(x, Mapping) and frozenset(x) == _ARRAYS)
