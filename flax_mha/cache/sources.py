"""The keys and values that a layer attends to: of this call, a cache, or another layer."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct

from flax_mha import masks
from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import Array
from flax_mha.cache.config import CacheConfig
from flax_mha.cache.extended import Extended
from flax_mha.cache.kv_cache import KVCache
from flax_mha.cache.storage import Memory


class KeyValue(struct.PyTreeNode):
    """The keys and values of one call of a layer, after normalization and rotary embedding.

    Attributes:
      key: [*B, S, K, H].
      value: [*B, S, K, Hv].
      lengths: int [*B], the number of real tokens of each row; None for all.
      ordered: True if the call had an `order`.
    """

    key: Any
    value: Any
    lengths: jax.Array | None = None
    ordered: bool = struct.field(pytree_node=False, default=False)

    def mask_padding(
        self, q: jax.Array, mask: masks.MaskLike | None, lengths: jax.Array | None
    ) -> masks.MaskLike | None:
        """Combine the mask of queries [*B, T, N, H] with a mask that hides all padding."""
        if self.lengths is None and lengths is None:
            return mask
        batch = q.shape[:-3]

        def as_lengths(lengths: jax.Array | None, length: int) -> jax.Array:
            if lengths is None:
                return jnp.full(batch, length)
            return shapes.per_row("lengths", lengths, batch, length)

        kv_lengths = as_lengths(self.lengths, self.key.shape[-3])
        q_lengths = as_lengths(lengths, q.shape[-3])
        return masks.combine(mask, masks.Lengths(kv_lengths, q_lengths))


# The keys and values of a layer; of a layer that decodes, with the tokens of its cache.
Shared: TypeAlias = KeyValue | Extended
# The keys and values of earlier calls or other layers, or the config of a cache to create.
Source: TypeAlias = KVCache | Memory | CacheConfig | Shared | None
Given: TypeAlias = Shared | tuple[Any, Any]


def as_source(kv: Given, k: Any, v: Any) -> Shared:
    """Return the argument `kv`, which replaces the inputs k and v, as `KeyValue` or `Extended`."""
    if k is not None or v is not None:
        raise ValueError(
            "kv are keys and values themselves, got inputs_k or inputs_v beside them; give one or "
            "the other"
        )
    if isinstance(kv, tuple) and len(kv) == 2:
        for name, x in zip(("keys", "values"), kv, strict=True):
            checks.floating(f"kv's {name}", x)
        return KeyValue(*kv)
    if isinstance(kv, Shared):
        return kv
    raise TypeError(
        f"kv must be the kv that a layer returns with return_kv=True, or a pair (keys, values), "
        f"got {checks.describe(kv)}; give one of these"
    )


def check_source(kv: Shared, q: jax.Array, Hv: int | None, mask: Any, order: Array | None) -> None:
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
    if isinstance(kv, KeyValue):
        if kv.ordered != (order is not None):
            raise ValueError(
                f"order must be given to both layers, the one that returns kv and the one that "
                f"takes it, or to none; got it for one, and keys of {k[-3]} tokens"
            )
        return
    lookback = None if mask is None else masks.as_mask(mask).max_lookback()
    if kv.window is not None and (lookback is None or lookback > kv.window):
        raise ValueError(
            f"kv are from a ring buffer with a window of {kv.window}, so this layer's mask must "
            f"see no earlier tokens, got mask={mask}; give masks.Window(W, 0) with W at most "
            f"{kv.window}"
        )


def open_source(
    cache: Source, k: Any, v: Any, is_self_attention: bool, mask: masks.MaskLike | None,
    lengths: jax.Array | None, is_ordered: bool,
) -> tuple[Shared, KVCache | Memory | None]:  # fmt: skip
    """Return the keys and values that a call attends to, and the cache after it.

    `cache` is the cache of earlier calls, another layer's keys and values, or a `CacheConfig`. The
    config creates an empty cache in self-attention (keys and queries of the same tokens), else a
    cache of this call's k and v [*B, S, K, ·]. They are None to attend to the cache. The layer's
    mask determines the window of a ring buffer. `lengths`, int [*B], are the numbers of real keys,
    or None.
    """
    if isinstance(cache, Shared):
        return cache, None
    if isinstance(cache, KVCache):
        return cache.extended(k, v, lengths)
    if isinstance(cache, CacheConfig):
        cache = cache.empty(k, v, mask) if is_self_attention else cache.memory(k, v)
    if isinstance(cache, Memory):
        k, v = cache.stored()
    return KeyValue(k, v, lengths, is_ordered), cache
