"""Caches as variables of a model: the collection `cache`.

A self-attention layer keeps its `KVCache` under `kv`, and a cross-attention layer under `memory`.
Layers under `nn.scan` stack theirs along a leading axis.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from flax_mha import sharding
from flax_mha.cache.kv_cache import KVCache
from flax_mha.kernels.call.stored import OfLayer, is_part

# A tree of caches, such as `variables['cache']` or all variables.
Collection = TypeVar("Collection")


def constrain_cache(cache: KVCache) -> KVCache:
    """Shard a cache by the logical axis rules, over the batch and the key/value heads."""
    return cache.map_by_names(lambda x, axes: sharding.name(sharding.constrain(x, axes), axes))


def of_layer(collection: Collection, layer: jax.Array) -> Collection:
    """Return one layer's part of stacked caches, with large arrays that it writes in place.

    A scan over the arrays would copy the whole cache: 7,648 MiB for a step of 1,503 MiB on a v5e.
    """

    def part(x: Any) -> Any:
        if not isinstance(x, KVCache):
            return x[layer]
        large = x.key.ndim - 1
        return jax.tree.map(lambda y: OfLayer(y, layer) if y.ndim >= large else y[layer], x)

    return jax.tree.map(part, collection, is_leaf=_is_cache)


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
      rows: int [R], indices into the last axis of *B.
    """
    return _map(lambda cache: cache.fork(rows), collection)


def truncate(collection: Collection, lengths: jax.Array | int) -> Collection:
    """Return the collection with at most the first `lengths` tokens of each row.

    `lengths` is int, or int [*B]. See `fork` for the collection, and `KVCache.truncate`.
    """
    return _map(lambda cache: cache.truncate(lengths), collection)


def reset(collection: Collection) -> Collection:
    """Return the collection with empty caches. An encoder's keys stay, and queries count from 0."""
    return truncate(collection, 0)


def free(collection: Any) -> jax.Array:
    """Return the number of tokens that each row has room for in all layers, int32 [rows]."""
    room = [x.free() for x in _caches(collection) if x.queries is None]
    # The layers of a scan are the leading axes.
    return functools.reduce(jnp.minimum, (x.min(range(x.ndim - 1)) for x in room))


def _map(fn: Callable[[KVCache], KVCache], collection: Any) -> Any:
    """Apply fn to all caches of a collection."""
    caches = iter(_caches(collection))

    def apply(x: Any) -> Any:
        if not _is_cache(x):
            return x
        new = fn(next(caches))
        if isinstance(x, KVCache):
            return new
        return {name: variable.replace(vars(new)[name]) for name, variable in x.items()}

    return jax.tree.map(apply, collection, is_leaf=_is_cache)


def _caches(collection: Any) -> list[KVCache]:
    """Return the caches of a collection."""
    caches = [
        x if isinstance(x, KVCache)
        else KVCache(**{name: y.get_value() for name, y in x.items()}, window=x["key"].window)
        for x in filter(_is_cache, jax.tree.leaves(collection, is_leaf=_is_cache))
    ]  # fmt: skip
    if not caches:
        raise ValueError(
            "a collection must have the cache of a layer, got one without; give "
            "variables['cache'] of a model initialized with decode=True"
        )
    return caches


def _is_cache(x: Any) -> bool:
    # In a state of nnx, a cache is a mapping from names to variables.
    return isinstance(x, KVCache) or (isinstance(x, Mapping) and {"key", "length"} <= {*x})
