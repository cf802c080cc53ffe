"""What a layer attends to: keys and values of this call, of a cache, or of another layer."""

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
    """Keys and values of one call of a layer, as it attends to them: after norms and rotary.

    Attributes:
      key: [*B, S, K, H].
      value: [*B, S, K, Hv].
      lengths: int [*B], how many tokens of each row are real; None for all.
      ordered: whether the call had an `order`.
    """

    key: Any
    value: Any
    lengths: jax.Array | None = None
    ordered: bool = struct.field(pytree_node=False, default=False)

    def mask_padding(
        self, q: jax.Array, mask: masks.MaskLike | None, lengths: jax.Array | None
    ) -> masks.MaskLike | None:
        """Return the mask of queries [*B, T, N, H] and these keys, with all padding hidden."""
        if self.lengths is None and lengths is None:
            return mask
        batch = q.shape[:-3]

        def real(lengths: jax.Array | None, length: int) -> jax.Array:
            if lengths is None:
                return jnp.full(batch, length)
            return shapes.per_row("lengths", lengths, batch, length)

        both = real(self.lengths, self.key.shape[-3]), real(lengths, q.shape[-3])
        return masks.combine(mask, masks.Lengths(*both))


# Of a layer that decodes, with the tokens that its cache holds.
Shared: TypeAlias = KeyValue | Extended
# What a layer attends to beside its inputs, or is to make of them.
Source: TypeAlias = KVCache | Memory | CacheConfig | Shared | None
Given: TypeAlias = Shared | tuple[Any, Any]


def as_source(kv: Given, k: Any, v: Any) -> Shared:
    """What is given as `kv`, in place of inputs k and v, or an error that says what to give."""
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
        f"kv must be what a layer gave with return_kv=True, or keys and values as a pair, got "
        f"{checks.describe(kv)}"
    )


def check_source(kv: Shared, q: jax.Array, Hv: int | None, mask: Any, order: Array | None) -> None:
    """Check that keys and values of another layer fit this one's queries [*B, T, N, H] and mask."""
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
                f"order must be given to both layers, the one that gives keys and values and the "
                f"one that takes them, or to none; got it for one, and keys of {k[-3]} tokens"
            )
        return
    lookback = None if mask is None else masks.as_mask(mask).max_lookback()
    if kv.window is not None and (lookback is None or lookback > kv.window):
        raise ValueError(
            f"kv are from a ring buffer with a window of {kv.window}, so the mask of a layer that "
            f"takes them must see none before it, got mask={mask}; give masks.Window(W, 0) with W "
            f"at most {kv.window}"
        )


def open_source(
    cache: Source, k: Any, v: Any, is_self_attention: bool, mask: masks.MaskLike | None,
    lengths: jax.Array | None, is_ordered: bool,
) -> tuple[Shared, KVCache | Memory | None]:  # fmt: skip
    """Return what a call attends to, and the cache after it.

    Args:
      cache: that of earlier calls, or the keys and values of another layer; of a `CacheConfig` one
        is made: in self-attention an empty one for as many tokens, else one of these keys.
      k: [*B, S, K, H], of this call; or None, to attend to what the cache holds.
      v: [*B, S, K, Hv], likewise.
      is_self_attention: whether keys are of the queries' tokens.
      mask: that of the layer, which says what a ring buffer has to hold.
      lengths: int [*B], how many of the keys of each row are real; None for all.
      is_ordered: whether the call has an `order`.
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
