"""Caches as variables of flax layers: the collection `cache`.

A layer of self-attention holds

    cached_key, cached_value                [*B, K, S, ·]
    cached_key_scale, cached_value_scale    [*B, K, S], of int8
    cache_index                             int32 [*B], the rows' lengths
    cache_window                            int32, of a ring buffer
    cache_written                           int32 [*B], of a ring buffer: see `KVCache`

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

from flax_mha import inputs, masks, shapes, sharding
from flax_mha.cache import checks, slots
from flax_mha.cache.kv import KVCache
from flax_mha.cache.ring import FAR, truncated
from flax_mha.cache.slots import stored, take_rows
from flax_mha.kernels.stored import Stored
from flax_mha.sharding import LogicalNames

_SELF = {
    "cached_key": "key",
    "cached_value": "value",
    "cached_key_scale": "key_scale",
    "cached_value_scale": "value_scale",
    "cache_index": "length",
    "cache_written": "written",
}
_CROSS = ("cross_key", "cross_value", "cross_key_scale", "cross_value_scale")


def window(mask: masks.Mask | None, size: int | None) -> int | None:
    """How many tokens before itself a token sees, under a ring buffer of that size; else None.

    Raises:
      ValueError: if the mask sees what the ring has forgotten.
    """
    if size is None:
        return None
    inputs.positive(cache_window=size)
    reach = None if mask is None else masks.as_mask(mask).reach()
    if reach is None or reach >= size:
        raise ValueError(
            f"cache_window={size} keeps the last {size} tokens, so the layer's mask must see none "
            f"before them, got mask={mask}; give mask=masks.Window(W, 0) with W at most {size - 1}"
        )
    return reach


def real(lengths: jax.Array | None, q: jax.Array, k: Any, itself: bool) -> masks.Mask | None:
    """The mask of rows with so many real queries, and as many keys if they are the same tokens."""
    if lengths is None:
        return None
    lengths = shapes.per_row("lengths", lengths, q.shape[:-3], q.shape[-3])
    return masks.Lengths(lengths if itself else jnp.full_like(lengths, k.shape[-3]), lengths)


def load(layer: nn.Module, reach: int | None) -> KVCache | None:
    """The layer's cache of self-attention, if it has one."""
    if not layer.has_variable("cache", "cached_key"):
        return None
    fields: dict[str, Any] = {field: _get(layer, name) for name, field in _SELF.items()}
    return KVCache(**fields, window=reach)


def start(
    layer: nn.Module, k: jax.Array, v: jax.Array, itself: bool, dtype: Dtype | None,
    size: int | None, reach: int | None,
) -> tuple[Any, Any]:  # fmt: skip
    """The first call of a layer: makes room for tokens, or keeps those of an encoder.

    Args:
      layer: that holds nothing yet, or an encoder's tokens, which are replaced.
      k: [*B, S, K, H].
      v: [*B, S, K, Hv].
      itself: whether they are of self-attention.
      dtype: of the cache, None for that of k.
      size: slots of a ring buffer; None for S slots.
      reach: see `window`.

    Returns:
      Keys and values to attend to in this call.
    """
    *B, S, K, H = k.shape
    dtype = checks.dtype("cache_dtype", k.dtype if dtype is None else dtype)
    if not itself:
        return _remember(layer, k, v, dtype)
    S, Hv = S if size is None else size, v.shape[-1]
    store(layer, KVCache.empty(tuple(B), S, K, H, Hv, dtype=dtype, window=reach))
    return k, v


def store(layer: nn.Module, cache: KVCache) -> None:
    """Puts a cache into the layer's variables."""
    for name, field in _SELF.items():
        _put(layer, name, getattr(cache, field))
    if cache.window is not None:
        layer.put_variable("cache", "cache_window", jnp.int32(cache.window))


def _remember(
    layer: nn.Module, k: jax.Array, v: jax.Array, dtype: jnp.dtype
) -> tuple[Stored, Stored]:
    key, value = (slots.encode(x, dtype) for x in (k, v))
    for name, x in (("cross_key", key), ("cross_value", value)):
        scale = None if x.scale is None else jnp.swapaxes(x.scale[..., 0], -1, -2)
        _put(layer, name, jnp.swapaxes(x.values, -3, -2))
        _put(layer, f"{name}_scale", scale)
    return key, value


def recall(layer: nn.Module) -> tuple[Stored, Stored] | None:
    """The encoder's keys and values [*B, S, K, ·] that the layer holds, if it does."""
    if not layer.has_variable("cache", "cross_key"):
        return None
    key, value, key_scale, value_scale = (_get(layer, name) for name in _CROSS)
    return stored(key, key_scale), stored(value, value_scale)


def _get(layer: nn.Module, name: str) -> Any:
    return layer.get_variable("cache", name) if layer.has_variable("cache", name) else None


def _put(layer: nn.Module, name: str, x: jax.Array | None) -> None:
    if x is None:
        return
    names = ((None,) * x.ndim + _names(name))[-x.ndim :] if x.ndim else ()
    layer.put_variable("cache", name, sharding.name(sharding.constrain(x, names), names))


def _names(name: str) -> LogicalNames:
    """The logical names of a variable's last axes."""
    if name in ("cache_index", "cache_written"):
        return slots.ROWS
    return slots.SCALES if name.endswith("scale") else slots.SLOTS


def fork(collection: Any, rows: jax.Array) -> Any:
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

    def of(layer: dict[str, Any]) -> dict[str, Any]:
        same = {name: x for name, x in layer.items() if name == "cache_window"}
        rest = layer.keys() - same.keys()
        return same | {name: take_rows(layer[name], rows, _names(name)) for name in sorted(rest)}

    return _map("fork", of, collection)


def truncate(collection: Any, lengths: jax.Array | int) -> Any:
    """The collection with the first `lengths` (int, or int [*B]) tokens of each row, at most.

    What the encoder gave stays. A ring buffer can take back S − 1 − window tokens, or all; a row
    of which more are taken back has overflowed.

    Raises:
      ValueError, TypeError: if the collection has no cache; if lengths are no integers, have
        another shape, or are known to be negative. Where they are traced, such a row has
        overflowed.
    """
    return _truncate("truncate", collection, lengths)


def reset(collection: Any) -> Any:
    """The collection with no token in any row. What the encoder gave stays until it is replaced.

    Raises:
      ValueError, TypeError: if the collection has no cache.
    """
    return _truncate("reset", collection, 0)


def _truncate(name: str, collection: Any, lengths: jax.Array | int) -> Any:
    def of(layer: dict[str, Any]) -> dict[str, Any]:
        if "cache_index" not in layer:
            return layer
        index, size = layer["cache_index"], layer["cached_key"].shape[-2]
        written, reach = layer.get("cache_written"), layer.get("cache_window")
        # Layers of a scan have one each, the same.
        reach = None if reach is None else reach.max()
        to = checks.remaining(lengths, index.shape)
        index, written = truncated(index, written, to, size, reach)
        new = {"cache_index": index} | ({} if written is None else {"cache_written": written})
        return layer | new

    return _map(name, of, collection)


def free(collection: Any) -> jax.Array:
    """Int32 [rows], how many more tokens each row has room for in all layers.

    2³⁰ − 1 less its length where all layers have ring buffers.

    Raises:
      ValueError, TypeError: if no layer has a cache of self-attention.
    """
    found: list[jax.Array] = []

    def of(layer: dict[str, Any]) -> dict[str, Any]:
        if "cache_index" in layer:
            most = FAR - 1 if "cache_window" in layer else layer["cached_key"].shape[-2]
            left = jnp.maximum(most - layer["cache_index"], 0)
            # Layers of a scan lie before the rows.
            found.append(left.min(range(left.ndim - 1)))
        return layer

    _map("free", of, collection)
    if not found:
        raise ValueError(
            "free needs a collection with the cache of a self-attention layer, got none; give "
            "variables['cache'] of a model initialized with decode=True"
        )
    return functools.reduce(jnp.minimum, found)


def _map(name: str, fn: Callable[[dict[str, Any]], dict[str, Any]], collection: Any) -> Any:
    """Applies fn to the variables of each layer that has a cache; a function of that name does."""
    if not isinstance(collection, Mapping):
        raise TypeError(
            f"{name} needs the collection of a model's caches, got {type(collection).__name__}; "
            f"give variables['cache'], or call the method of a KVCache"
        )
    found = False

    def visit(tree: Any) -> Any:
        nonlocal found
        if not isinstance(tree, Mapping):
            return tree
        if "cached_key" in tree or "cross_key" in tree:
            found = True
            return fn(dict(tree))
        return {name: visit(child) for name, child in tree.items()}

    new = visit(collection)
    if not found:
        raise ValueError(
            f"{name} needs a collection with the cache of a layer, got one of {[*collection]}; "
            f"give variables['cache'] of a model initialized with decode=True"
        )
    return new
