"""The key/value cache of a layer, and its options."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from flax.typing import Dtype

from flax_mha import masks, sharding
from flax_mha.base import checks, shapes, symbols
from flax_mha.base.shapes import Shape
from flax_mha.base.trees import Struct
from flax_mha.cache.key_values import KeyValues
from flax_mha.cache.slots import (
    EIGHT_BITS,
    NO_POSITION,
    encode,
    has_scales,
    positions_from,
    stored,
    write,
)
from flax_mha.kernels.call.stored import is_part, map_part, read
from flax_mha.sharding import LogicalNames


class KVCache(Struct):
    """The keys and values of earlier tokens. Each row of the batch has its own length.

    Slot j holds the token at position j. With a window, the slots are a ring buffer of the last S
    tokens, and slot p mod S holds the token at position p. An encoder's keys fill their cache.

    Attributes:
      key: [*B, K, S, H].
      value: [*B, K, S, Hv]. A value that is infinite or NaN is 0 here, and its key is NaN.
      length: int32 [*B], the number of tokens appended to each row.
      key_scale: float32 [*B, K, S], the scales of keys in 8 bits; else None.
      value_scale: float32 [*B, K, S], the scales of values in 8 bits; else None.
      written: int32 [*B], the largest length since the row was empty, for a ring buffer; else None.
        Tokens before written − S have been overwritten.
      queries: int32 [*B], the number of queries so far, for an encoder's keys; else None.
      window: the number of earlier tokens that a token sees, at most S − 1; None for all.
    """

    key: jax.Array
    value: jax.Array
    length: jax.Array
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None
    written: jax.Array | None = None
    queries: Any = None
    window: int | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def empty(
        cls, batch: Shape, slots: int, num_kv_heads: int, head_dim: int,
        v_head_dim: int | None = None, *, dtype: Dtype = jnp.float32, window: int | None = None,
    ) -> Self:  # fmt: skip
        """Return an empty cache.

        Args:
          batch: the batch dimensions *B.
          slots: S.
          num_kv_heads: K.
          head_dim: H.
          v_head_dim: Hv (default: H).
          dtype: the dtype of keys and values, as in `CacheConfig`.
          window: the number of earlier tokens that a token sees, for a ring buffer; None for all.
        """
        dtype = checks.dtype("dtype", dtype, EIGHT_BITS)
        if window is not None and window >= slots:
            raise ValueError(
                f"a window of {window} needs at least {window + 1} slots, got {slots}; give more"
            )
        heads = (*batch, num_kv_heads, slots)
        # Each scale is an array of its own, because one array cannot be donated twice.
        scales = [jnp.zeros(heads, jnp.float32) if has_scales(dtype) else None for _ in range(2)]
        return cls(
            jnp.zeros((*heads, head_dim), dtype),
            jnp.zeros((*heads, v_head_dim or head_dim), dtype),
            jnp.zeros(batch, jnp.int32), scales[0], scales[1],
            None if window is None else jnp.zeros(batch, jnp.int32), window=window,
        )  # fmt: skip

    @property
    def names(self) -> LogicalNames:
        """The logical names of the last axes of keys. Scales and lengths have the first of them."""
        is_plain = self.window is None and self.queries is None
        return "batch", "kv_heads", "cache_length" if is_plain else None, None

    @property
    def slots(self) -> int:
        """The number of slots, S."""
        return self.key.shape[-2]

    def next_positions(self, T: int) -> jax.Array:
        """Return the positions of the next T queries of each row, int32 [*B, T]."""
        return positions_from(self.length if self.queries is None else self.queries, T)

    def append(self, key: jax.Array, value: jax.Array, lengths: jax.Array | None = None) -> Self:
        """Append T tokens to each row, or its first `lengths` tokens, and return the cache.

        Without a window, tokens beyond the last slot are dropped, and the row has overflowed.
        Arguments are as in `extend`.
        """
        return self.extended(key, value, lengths)[1]

    def extend(
        self, q: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array | None = None,
        *, mask: masks.MaskLike | None = None, **call: Any,
    ) -> tuple[Any, Self]:  # fmt: skip
        """Append tokens, and attend from them to all tokens so far, including themselves.

        Args:
          q: [*B, T, N, H], the queries of the new tokens.
          key: [*B, T, K, H].
          value: [*B, T, K, Hv].
          lengths: int [*B], the real tokens of each row, clipped to 0 … T if traced (default: all).
            The outputs of other tokens are 0.
          mask: a mask, combined with causality and the window.
          **call: other arguments of `dot_product_attention`. `attention` is called in its place.

        Returns:
          The result of `dot_product_attention`, NaN for a token that found no slot and for later
          tokens of its row; and the new cache.
        """
        keys, new = self.extended(key, value, lengths)
        return keys.attend(q, mask=mask, lengths=lengths, **call), new

    def extended(
        self, key: jax.Array, value: jax.Array, lengths: jax.Array | None = None
    ) -> tuple[KeyValues, Self]:
        """Append tokens, and return the keys that their queries attend to, and the new cache."""
        *B, K, S, H = self.key.shape
        *_, T, _, _ = checks.floating("key", key).shape
        expected = (*B, T, K, H), (*B, T, K, self.value.shape[-1])
        fits = self.window is not None or symbols.at_most(T, S)
        if (key.shape, checks.floating("value", value).shape) != expected or not fits:
            raise ValueError(
                f"keys and values for the cache must have shapes [*B, T, K, ·], with T at most S "
                f"where the cache is [*B, K, S, H] = {self.key.shape}, got {key.shape} and "
                f"{value.shape}; initialize the cache with the full batch and length"
            )
        count, q_positions = self._count(T, lengths), self.next_positions(T)
        length, tokens = self.length + count, encode(key, value, self.key.dtype)
        arrays = {name: x for name, x in vars(self).items() if name in tokens}
        written = self.written
        new = self.replace(
            length=length, written=None if written is None else jnp.maximum(written, length),
            **{name: write(x, tokens[name], self.length, count, self.names, self.window is not None)
               for name, x in arrays.items()},
        )  # fmt: skip
        slots, k_positions = vars(new), new._positions()
        if self.window is not None and self.slots < self.window + T:
            # The new tokens overwrite slots that these queries see: read the old ring and them.
            axis = self.length.ndim + 1
            slots = {n: jnp.concatenate([read(x), tokens[n]], axis) for n, x in arrays.items()}
            k_positions = jnp.concatenate([self._positions(), q_positions], -1)
        k, v = stored(slots, self.names[2] or "length")
        # The first token that found no slot, and those after it.
        lost = new.overflowed[..., None] & (q_positions >= self._max_length)
        keys = KeyValues(
            k, v, None if lengths is None else length, q_positions, k_positions, stored(tokens),
            lost, has_slots=True, window=self.window,
        )  # fmt: skip
        return keys, new

    def counted(self, T: int, lengths: jax.Array | None) -> tuple[KeyValues, Self]:
        """Return an encoder's keys and values for T queries, and the cache that counts them."""
        keys = KeyValues(*stored(vars(self)), q_positions=self.next_positions(T))
        return keys, self.replace(queries=self.queries + self._count(T, lengths))

    def free(self) -> jax.Array:
        """Return the number of tokens that each row has room for, int32 [*B].

        With a window, this is beyond any length.
        """
        return jnp.maximum(self._max_length - self.length, 0)

    def reset(self) -> Self:
        """Return the cache without tokens. An encoder's keys stay, and queries count from 0."""
        return self.truncate(0)

    def truncate(self, lengths: jax.Array | int) -> Self:
        """Return the cache with at most the first `lengths` (int, or int [*B]) tokens of each row.

        With a window, a row can drop its last S − window tokens, or all. A row that drops more has
        overflowed. An encoder's keys stay, and at most `lengths` queries are counted.
        """
        keep = checks.integers("lengths", lengths)
        remedy = "give the number of tokens to keep, such as length - 1 to drop one"
        checks.within("lengths", keep, None, remedy)
        keep = jnp.asarray(shapes.lead(keep, self.length.ndim))
        if self.queries is not None:
            return self.replace(queries=jnp.minimum(self.queries, keep))
        length, written = jnp.minimum(self.length, keep), self.written
        if written is None or self.window is None:
            lost = (self.length >= NO_POSITION) & (length > 0)
        else:
            # The first token that the next token sees.
            first = jnp.maximum(length - self.window, 0)
            lost = first < jnp.minimum(length, written - self.slots)
            written = jnp.where(length == 0, 0, written)
        lost |= keep < 0
        return self.replace(
            length=jnp.where(lost, NO_POSITION, length),
            written=None if written is None else jnp.where(lost, NO_POSITION, written),
        )

    def fork(self, rows: jax.Array) -> Self:
        """Return the cache with some rows of the batch: beams, or copies for best-of-n.

        `rows` are indices into the last axis of *B, int [R]. A traced index out of range gives an
        overflowed row.
        """
        indices, batch = checks.integers("rows", rows), self.length.shape
        checks.within("rows", indices, batch[-1], "give indices of existing rows")
        shapes.check_shape("rows", indices, {"[R]": (indices.size,)}, "give jnp.array([row])")
        axis = len(batch) - 1

        def take(x: jax.Array, rows: jax.Array) -> jax.Array:
            # For `take`, negative indices count from the end.
            rows = jnp.where(rows < 0, x.shape[axis], rows)
            fill = NO_POSITION if x.dtype == jnp.int32 else 0
            return jnp.take(x, rows, axis=axis, mode="fill", fill_value=fill)

        return self.map_by_names(lambda x, names: sharding.auto(take, names, x, indices))

    @property
    def overflowed(self) -> jax.Array:
        """The rows with missing tokens that later tokens should see, bool [*B]."""
        return self.length > self._max_length

    def map_by_names(self, fn: Callable[[jax.Array, LogicalNames], jax.Array]) -> Self:
        """Return the cache with fn applied to each array and the logical names of its axes."""
        end = 4 - self.key.ndim

        def apply(x: Any) -> Any:
            names = self.names[: x.ndim + end]
            # Leading axes have no name.
            return map_part(lambda y: fn(y, (None,) * (y.ndim - len(names)) + names), x)

        return jax.tree.map(apply, self, is_leaf=is_part)

    @property
    def _max_length(self) -> int:
        return self.slots if self.window is None else NO_POSITION - 1

    def _count(self, T: int, lengths: jax.Array | None) -> jax.Array:
        """Return the number of real tokens of a call of T tokens in each row, int32 [*B]."""
        if lengths is None:
            return jnp.full_like(self.length, T)
        return jnp.clip(shapes.per_row("lengths", lengths, self.length.shape, T), 0, T)

    def _positions(self) -> Any:
        """Return the position of the token in each slot of a ring, int32 [*B, S], else None."""
        if self.window is None:
            return None
        slot = shapes.lead(jnp.arange(self.slots, dtype=jnp.int32), self.length.ndim + 1)
        last = self.length[..., None] - 1
        # The last position of each slot that is below the length.
        newest = last - (last - slot) % self.slots
        return jnp.where(newest < 0, NO_POSITION, newest)


class Encoded(Struct):
    """An encoder's output, as the argument `kv` of a layer that decodes.

    The layer projects it once. Later calls attend to the same keys and values, with `Encoded()` or
    without `kv`. Without `decode` it means the same as `inputs_k` and `inputs_v`.

    Attributes:
      inputs_k: the inputs of the keys [*B, S, D']; None for the keys and values that are kept.
      inputs_v: the inputs of the values [*B, S, D''] (default: inputs_k).
      makes_room: True in a call that only makes the cache, as `init` does. Its queries do not
        count.
      queries: int32 [*B], the number of earlier queries, or None. The layer sets it.
    """

    inputs_k: Any = None
    inputs_v: Any = None
    makes_room: bool = struct.field(pytree_node=False, default=False)
    queries: Any = None

    def keep(
        self, key: jax.Array, value: jax.Array, dtype: Dtype, T: int, lengths: jax.Array | None
    ) -> tuple[KeyValues, KVCache]:
        """Return the keys and values that T queries attend to, and the cache that keeps them.

        Arguments are the projected keys [*B, S, K, H] and values, the dtype of the cache, and as in
        `KVCache.counted`.
        """
        *batch, S, _, _ = key.shape
        queries = jnp.zeros(batch, jnp.int32) if self.queries is None else self.queries
        length = jnp.full(batch, S, jnp.int32)
        arrays: Any = encode(key, value, dtype)
        new = KVCache(length=length, queries=queries, **arrays)
        keys, counted = new.counted(T, lengths)
        if self.queries is not None:
            return keys, counted
        # The first queries are at 0 … T−1, which is static.
        return keys.replace(q_positions=None), new if self.makes_room else counted


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """The options of a layer's cache.

    Attributes:
      dtype: the dtype of stored keys and values (default: their own): one of 16 bits or more, or
        "int8", "float8_e4m3fn" or "float8_e5m2", with a scale for each token and head.
      slots: the size of a ring buffer, at least W + 1 under a mask `Window(W, ·)` (default: no ring
        buffer, but a slot for each token of the input that creates the cache).
    """

    dtype: Dtype | None = None
    slots: int | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            checks.dtype("CacheConfig.dtype", self.dtype, EIGHT_BITS)

    def window(self, mask: masks.MaskLike | None) -> int | None:
        """Return the number of earlier tokens that a token sees in a ring buffer, or None."""
        if self.slots is None:
            return None
        window = None if mask is None else masks.as_mask(mask).max_lookback()
        if window is None or window >= self.slots:
            raise ValueError(
                f"CacheConfig.slots={self.slots} keeps the last {self.slots} tokens, so the "
                f"layer's mask must see none before them, got mask={mask}; give "
                f"mask=masks.Window(W, 0) with W at most {self.slots - 1}"
            )
        return window

    def empty(self, k: jax.Array, v: jax.Array, mask: masks.MaskLike | None) -> KVCache:
        """Return an empty cache with room for the tokens of keys [*B, S, K, H] and values."""
        *B, S, K, H = k.shape
        return KVCache.empty(
            tuple(B), self.slots or S, K, H, v.shape[-1], dtype=self.dtype or k.dtype,
            window=self.window(mask),
        )  # fmt: skip
