"""Caches as variables of a model: the collection `cache`.

A layer of self-attention holds a `KVCache` under `kv`, one of cross-attention a `Memory` under
`memory`, of all tokens of the encoder. Layers under `nn.scan` have theirs with a leading axis.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from flax_mha import sharding
from flax_mha.cache.kv_cache import KVCache
from flax_mha.cache.storage import AnySlots, Slots, by_names
from flax_mha.sharding import LogicalNames

# A tree of those, such as `variables['cache']`, or all variables.
Collection = TypeVar("Collection")


def constrained(held: AnySlots) -> AnySlots:
    """What a layer holds, as the rules divide it: rows and key/value heads, never slots."""

    def constrain(x: jax.Array, names: LogicalNames) -> Any:
        # All axes have a name here: those before the batch None.
        every = ((None,) * x.ndim + names)[len(names) :]
        return sharding.name(sharding.constrain(x, every), every)

    return by_names(constrain, held)


def fork(collection: Collection, rows: jax.Array) -> Collection:
    """The collection with the rows of the batch in that order: beams, or copies for best-of-n.

    Args:
      collection: `cache` of a model, of any depth (or all its variables: others stay as they are).
      rows: int [R], indices of rows (of the last axis of *B); R may differ from the rows there
        are.

    Raises:
      ValueError, TypeError: if the collection has no cache; if rows are no indices, or known to be
        out of range. Where they are traced, such a row has overflowed, and stays so until it is
        emptied.
    """
    return _map("fork", lambda held: held.fork(rows), collection)


def truncate(collection: Collection, lengths: jax.Array | int) -> Collection:
    """The collection with the first `lengths` (int, or int [*B]) tokens of each row, at most.

    What the encoder gave stays. A ring buffer can take back S − 1 − window tokens, or all; a row
    of which more are taken back has overflowed.

    Raises:
      ValueError, TypeError: if the collection has no cache; if lengths are no integers, have
        another shape, or are known to be negative. Where they are traced, such a row has
        overflowed.
    """
    return _map("truncate", _keeping(lengths), collection)


def reset(collection: Collection) -> Collection:
    """The collection with no token in any row. What the encoder gave stays until it is replaced.

    Raises:
      ValueError, TypeError: if the collection has no cache.
    """
    return _map("reset", _keeping(0), collection)


def free(collection: Any) -> jax.Array:
    """Int32 [rows], how many more tokens each row has room for in all layers.

    2³⁰ − 1 less its length where all layers have ring buffers.

    Raises:
      ValueError, TypeError: if no layer has a cache of self-attention.
    """
    held = [x for x in _caches("free", collection) if isinstance(x, KVCache)]
    if not held:
        raise ValueError(
            "free needs a collection with the cache of a self-attention layer, got none; give "
            "variables['cache'] of a model initialized with decode=True"
        )
    left = (x.free() for x in held)
    # Layers of a scan lie before the rows.
    return functools.reduce(jnp.minimum, (x.min(range(x.ndim - 1)) for x in left))


def _keeping(lengths: jax.Array | int) -> Callable[[Slots], Slots]:
    return lambda held: held.truncate(lengths) if isinstance(held, KVCache) else held


def _map(name: str, fn: Callable[[Slots], Slots], collection: Any) -> Any:
    """Applies fn to what each layer holds; a function of that name does."""
    _caches(name, collection)
    return jax.tree.map(lambda x: fn(x) if _is_cache(x) else x, collection, is_leaf=_is_cache)


def _caches(name: str, collection: Any) -> list[Slots]:
    """What the layers hold, for a function of that name."""
    if not isinstance(collection, Mapping | list | tuple):
        raise TypeError(
            f"{name} needs the collection of a model's caches, got {type(collection).__name__}; "
            f"give variables['cache'], or call the method of a KVCache"
        )
    caches = [x for x in jax.tree.leaves(collection, is_leaf=_is_cache) if _is_cache(x)]
    if not caches:
        raise ValueError(
            f"{name} needs a collection with the cache of a layer, got one of {[*collection]}; "
            f"give variables['cache'] of a model initialized with decode=True"
        )
    return caches


def _is_cache(x: Any) -> bool:
    return isinstance(x, Slots)
