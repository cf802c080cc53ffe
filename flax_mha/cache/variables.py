"""Caches as variables of flax layers: the collection `cache`.

A layer of self-attention holds

    cached_key, cached_value                [*B, K, S, ·]
    cached_key_scale, cached_value_scale    [*B, K, S], of int8
    cache_index                             int32 [*B], the rows' lengths
    cache_window                            int32, of a ring buffer

and one of cross-attention `cross_key`, `cross_value`, `cross_key_scale` and `cross_value_scale`, of
all tokens of the encoder. Layers under `nn.scan` have them with a leading axis.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype

from flax_mha import sharding
from flax_mha.cache import slots
from flax_mha.cache.kv import FAR, KVCache, check_dtype, stored, take_rows, truncated
from flax_mha.kernels.stored import Stored

_SELF = {
    "cached_key": "key",
    "cached_value": "value",
    "cached_key_scale": "key_scale",
    "cached_value_scale": "value_scale",
    "cache_index": "length",
}
_CROSS = ("cross_key", "cross_value", "cross_key_scale", "cross_value_scale")


def load(layer: nn.Module, window: int | None) -> KVCache | None:
    """The layer's cache of self-attention, if it has one."""
    if not layer.has_variable("cache", "cached_key"):
        return None
    fields = {
        field: layer.get_variable("cache", name)
        for name, field in _SELF.items()
        if layer.has_variable("cache", name)
    }
    return KVCache(**fields, window=window)


def make(
    layer: nn.Module, k: jax.Array, v: jax.Array, dtype: Dtype | None, size: int | None,
    window: int | None,
) -> None:  # fmt: skip
    """Makes room in the layer for as many tokens as k [*B, S, K, H], or `size` in a ring."""
    *B, S, K, H = k.shape
    store(
        layer,
        KVCache.empty(
            tuple(B), S if size is None else size, K, H, v.shape[-1],
            dtype=k.dtype if dtype is None else dtype, window=window,
        ),
    )  # fmt: skip


def store(layer: nn.Module, cache: KVCache) -> None:
    """Puts a cache into the layer's variables."""
    for name, field in _SELF.items():
        _put(layer, name, getattr(cache, field))
    if cache.window is not None:
        layer.put_variable("cache", "cache_window", jnp.int32(cache.window))


def remember(
    layer: nn.Module, k: jax.Array, v: jax.Array, dtype: Dtype | None
) -> tuple[Stored, Stored]:
    """Keeps the encoder's keys [*B, S, K, H] and values [*B, S, K, Hv] in the layer."""
    encoded = [slots.encode(x, check_dtype(x.dtype if dtype is None else dtype)) for x in (k, v)]
    for name, (x, scale) in zip(_CROSS, encoded, strict=False):
        _put(layer, name, jnp.swapaxes(x, -3, -2))
        _put(layer, f"{name}_scale", None if scale is None else jnp.swapaxes(scale[..., 0], -1, -2))
    return tuple(Stored(*held, jnp.float32) for held in encoded)


def recall(layer: nn.Module) -> tuple[Stored, Stored] | None:
    """The encoder's keys and values [*B, S, K, ·] that the layer holds, if it does."""
    if not layer.has_variable("cache", "cross_key"):
        return None
    held = (
        layer.get_variable("cache", name) if layer.has_variable("cache", name) else None
        for name in _CROSS
    )
    key, value, key_scale, value_scale = held
    return stored(key, key_scale), stored(value, value_scale)


def _put(layer: nn.Module, name: str, x: jax.Array | None) -> None:
    if x is None:
        return
    known = slots.ROWS if name == "cache_index" else slots.SCALES if "scale" in name else slots.SLOTS
    names = ((None,) * x.ndim + known)[-x.ndim :] if x.ndim else ()
    layer.put_variable("cache", name, sharding.name(sharding.constrain(x, names), names))


def fork(collection: Any, rows: jax.Array) -> Any:
    """The collection with the rows of the batch in that order: beams, or copies for best-of-n.

    Args:
      collection: `cache` of a model, of any depth.
      rows: int [R], indices of rows (of the last axis of *B); R may differ from the rows there
        are. One out of range gives a row that has overflowed.
    """

    def of(layer: dict[str, Any]) -> dict[str, Any]:
        return {name: x if name == "cache_window" else _fork(name, x, rows) for name, x in layer.items()}

    return _map(of, collection)


def truncate(collection: Any, lengths: jax.Array | int) -> Any:
    """The collection with the first `lengths` (int, or int [*B]) tokens of each row, at most.

    What the encoder gave stays. A ring buffer can take back S − 1 − window tokens; a row of which
    more are taken back has overflowed.
    """

    def of(layer: dict[str, Any]) -> dict[str, Any]:
        if "cache_index" not in layer:
            return layer
        window, length = layer.get("cache_window"), layer["cache_index"]
        if window is not None:
            # Layers of a scan have one each, of the same size.
            window = window.max()
        size = layer["cached_key"].shape[-2]
        return {**layer, "cache_index": truncated(length, lengths, size, window)}

    return _map(of, collection)


def reset(collection: Any) -> Any:
    """The collection with no token in any row. What the encoder gave stays until it is replaced."""
    return truncate(collection, 0)


def free(collection: Any) -> jax.Array:
    """Int32 [rows], how many more tokens each row has room for in all layers.

    2³⁰ less its length where all layers have ring buffers.

    Raises:
      ValueError: if no layer has a cache of self-attention.
    """
    found: list[jax.Array] = []

    def of(layer: dict[str, Any]) -> dict[str, Any]:
        if "cache_index" in layer:
            most = FAR - 1 if "cache_window" in layer else layer["cached_key"].shape[-2]
            left = jnp.maximum(most - layer["cache_index"], 0)
            # Layers of a scan lie before the rows.
            found.append(left.min(range(left.ndim - 1)))
        return layer

    _map(of, collection)
    if not found:
        raise ValueError(
            "free needs a collection with the cache of a self-attention layer, got none; give "
            "variables['cache'] of a model initialized with decode=True"
        )
    return functools.reduce(jnp.minimum, found)


def _map(fn: Callable[[dict[str, Any]], dict[str, Any]], tree: Any) -> Any:
    """Applies fn to the variables of each layer."""
    if not isinstance(tree, Mapping):
        return tree
    if "cached_key" in tree or "cross_key" in tree:
        return fn(dict(tree))
    return {name: _map(fn, child) for name, child in tree.items()}


def _fork(name: str, x: jax.Array, rows: jax.Array) -> jax.Array:
    after = {"cache_index": 1}.get(name, 3 if name.endswith("scale") else 4)
    return take_rows(x, rows, x.ndim - after)
