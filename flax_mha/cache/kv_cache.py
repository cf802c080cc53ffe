"""The key/value cache of self-attention: append, attend, truncate, fork."""

from typing import Any, Self, Unpack, overload

import jax
import jax.numpy as jnp
from flax import struct
from flax.typing import Dtype

from flax_mha import masks
from flax_mha.base import checks, shapes, symbols
from flax_mha.base.shapes import Shape
from flax_mha.base.trees import Struct
from flax_mha.cache.extended import Extended, attend_causally, nan_where_lost
from flax_mha.cache.format import Format
from flax_mha.cache.sources import Tokens
from flax_mha.cache.storage import NO_POSITION, Memory, Slots, write
from flax_mha.kernels.call.bind import Options
from flax_mha.kernels.call.stored import is_part, map_part, read
from flax_mha.sharding import LogicalNames


class KVCache(Slots, Struct):
    """The keys and values of earlier tokens. Each row of the batch has its own length.

    Without a window, slot j holds the token at position j. With a window, the slots are a ring
    buffer: slot p mod S holds the token at position p, and the last S tokens are held.

    Attributes:
      key: [*B, K, S, H], heads first, the layout that decoding reads.
      value: [*B, K, S, Hv], 0 for a value that is infinite or NaN, which makes its key NaN.
      length: int32 [*B], the tokens appended to each row. A row of length 0 is empty.
      key_scale: the scales of keys in 8 bits, float32 [*B, K, S]; else None.
      value_scale: the scales of values in 8 bits, float32 [*B, K, S]; else None.
      written: int32 [*B], for a ring buffer the maximum length since the row was empty; else None.
        Tokens before written − S have been overwritten, even if the row was truncated since.
      window: the number of earlier tokens that a token sees (`masks.Window(window, 0)`), at most
        S − 1; None for all.
    """

    key: jax.Array
    value: jax.Array
    length: jax.Array
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None
    written: jax.Array | None = None
    window: int | None = struct.field(pytree_node=False, default=None)
    appends = True
    has_slots = True
    variable = "kv"

    @classmethod
    def empty(
        cls, batch: Shape, slots: int, num_kv_heads: int, head_dim: int,
        v_head_dim: int | None = None, *, dtype: Dtype = jnp.float32, window: int | None = None,
    ) -> Self:  # fmt: skip
        """Return an empty cache.

        Args:
          batch: the batch dimensions *B.
          slots: S; with a window at least window + 1.
          num_kv_heads: K.
          head_dim: H.
          v_head_dim: Hv (default: H).
          dtype: the dtype of keys and values: one of 16 bits or more, in which finite numbers
            beyond its range are stored as its largest, or int8, float8_e4m3fn or float8_e5m2, with
            a scale for each token and head.
          window: the number of earlier tokens that a token sees, for a ring buffer; None for all.

        Raises:
          ValueError, TypeError: if sizes, the window or the dtype are not valid.
        """
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        checks.positive(
            slots=slots, num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim
        )
        batch = checks.sizes("batch", batch)
        form = Format.checked("dtype", dtype)
        if window is not None and checks.integer("window", window) >= slots:
            raise ValueError(
                f"a window of {window} needs at least {window + 1} slots, got {slots}; give more"
            )
        heads = (*batch, num_kv_heads, slots)
        # Two arrays, because one array cannot be donated twice.
        is_plain = form.largest is None
        scales = [None if is_plain else jnp.zeros(heads, jnp.float32) for _ in range(2)]
        return cls(
            jnp.zeros((*heads, head_dim), form.dtype), jnp.zeros((*heads, v_head_dim), form.dtype),
            jnp.zeros(batch, jnp.int32), scales[0], scales[1],
            None if window is None else jnp.zeros(batch, jnp.int32), window,
        )  # fmt: skip

    @property
    def names(self) -> LogicalNames:
        """The logical names of the last axes of keys. A ring buffer is not sharded."""
        return "batch", "kv_heads", None if self.window is not None else "cache_length", None

    @property
    def slots(self) -> int:
        """The number of slots, S."""
        return self.key.shape[-2]

    def append(self, key: jax.Array, value: jax.Array, lengths: jax.Array | None = None) -> Self:
        """Append T ≥ 1 tokens to each row, or its first `lengths` tokens, and return the cache.

        Without a window, tokens beyond the last slot are dropped, and the row has overflowed.

        Args:
          key: [*B, T, K, H].
          value: [*B, T, K, Hv].
          lengths: int [*B], the real tokens of each row, clipped to 0 … T if traced (default: all).

        Raises:
          ValueError, TypeError: if tokens or lengths do not fit the cache.
        """
        return self._append(key, value, lengths)[1]

    def attend(
        self, q: jax.Array, q_positions: jax.Array, *, mask: masks.MaskLike | None = None,
        **call: Any,
    ) -> Any:  # fmt: skip
        """Attend to all cached tokens, each query up to its own position.

        Args:
          q: [*B, T, N, H].
          q_positions: int [*B, T], such as `next_positions(T)` from before the last `append`.
          mask: a mask, combined with causality and the window. The last axis of an array is the
            slots.
          **call: other arguments of `dot_product_attention`. `attention` is called in its place.

        Returns:
          The result of `dot_product_attention`. The output of a query is NaN if a token that it
          should see found no slot, or was overwritten in the ring buffer.
        """
        positions = checks.integers("q_positions", q_positions)
        result = attend_causally(
            q, self.stored(), mask, call, self.window, self.length, q_positions=positions,
            kv_positions=None if self.window is None else self._positions(),
        )  # fmt: skip
        positions = jnp.asarray(shapes.lead(positions, self.length.ndim + 1))
        lost = self._lost(positions)
        if self.window is not None and self.written is not None:
            # The first tokens that the queries see may have been overwritten.
            first = jnp.maximum(positions - self.window, 0)
            lost |= first < self.written[..., None] - self.slots
        return nan_where_lost(result, lost)

    @overload
    def extend(
        self, q: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array | None = ...,
        **call: Unpack[Options],
    ) -> tuple[jax.Array, Self]: ...  # fmt: skip
    @overload
    def extend(
        self, q: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array | None = ...,
        *, mask: masks.MaskLike | None = ..., **call: Any,
    ) -> tuple[Any, Self]: ...  # fmt: skip
    def extend(
        self, q: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array | None = None,
        *, mask: masks.MaskLike | None = None, **call: Any,
    ) -> tuple[Any, Self]:  # fmt: skip
        """Append tokens, and attend from them to all tokens so far, including themselves.

        Args:
          q: [*B, T, N, H], the queries of the new tokens.
          key: [*B, T, K, H].
          value: [*B, T, K, Hv].
          lengths: int [*B], the real tokens of each row (default: all). The other outputs are 0.
          mask: a mask, combined with causality and the window.
          **call: other arguments of `dot_product_attention`. `attention` is called in its place.

        Returns:
          The result of `dot_product_attention`, NaN for a token that found no slot and for later
          tokens of its row; and the new cache.
        """
        extended, new = self.extended(key, value, lengths)
        return extended.attend(q, mask=mask, lengths=lengths, **call), new

    def extended(
        self, key: jax.Array, value: jax.Array, lengths: jax.Array | None = None
    ) -> tuple[Extended, Self]:
        """Append tokens, and return the keys and values that they attend to, and the new cache."""
        tokens, new = self._append(key, value, lengths)
        T = key.shape[-3]
        q_positions = self.next_positions(T)
        visible: Slots = new
        k_positions = None
        if self.window is not None and self.slots >= self.window + T:
            k_positions = new._positions()
        elif self.window is not None:
            # The new tokens overwrite slots that these queries see: read the old ring and them.
            axis = self.length.ndim + 1
            visible = jax.tree.map(
                lambda old, new: jnp.concatenate([read(old), new], axis), self._memory, tokens,
                is_leaf=is_part,
            )  # fmt: skip
            k_positions = jnp.concatenate([self._positions(), q_positions], axis=-1)
        extended = Extended(
            *visible.stored(), tokens.stored(), q_positions, k_positions,
            new.length, new._lost(q_positions), ragged=lengths is not None, window=self.window,
        )  # fmt: skip
        return extended, new

    @property
    def is_ring(self) -> bool:
        """True for a ring buffer."""
        return self.window is not None

    def open(self, tokens: Tokens) -> tuple[Extended, Self]:
        """Return the cached and new keys and values, and the cache with a call's tokens."""
        return self.extended(*tokens.kept, tokens.lengths)

    def free(self) -> jax.Array:
        """Return the number of tokens that each row has room for, int32 [*B].

        With a window, this is 2³⁰ − 1 minus the row's length.
        """
        return jnp.maximum(self._max_length - self.length, 0)

    def reset(self) -> Self:
        """Return the cache without tokens."""
        return self.truncate(0)

    def truncate(self, lengths: jax.Array | int) -> Self:
        """Return the cache with at most the first `lengths` (int, or int [*B]) tokens of each row.

        With a window, a row can drop its last S − window tokens, or all. If it drops more,
        tokens that it needs were overwritten, and it has overflowed.

        Raises:
          ValueError, TypeError: if lengths are not integers, have another shape, or are negative.
            A traced negative length gives an overflowed row.
        """
        keep = self.kept_lengths(lengths)
        length, written = jnp.minimum(self.length, keep), self.written
        if self.window is None or written is None:
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

    @property
    def overflowed(self) -> jax.Array:
        """The rows with missing tokens that later tokens should see, bool [*B]."""
        return self.length > self._max_length

    @property
    def _max_length(self) -> int:
        return self.slots if self.window is None else NO_POSITION - 1

    def _lost(self, positions: jax.Array) -> jax.Array:
        """Return True for positions [*B, T] at or after the first token that found no slot."""
        return self.overflowed[..., None] & (positions >= self._max_length)

    @property
    def _memory(self) -> Memory:
        return Memory(self.key, self.value, self.key_scale, self.value_scale)

    def _positions(self) -> jax.Array:
        """Return the position of the token in each ring slot, int32 [*B, S], or NO_POSITION."""
        slot = shapes.lead(jnp.arange(self.slots, dtype=jnp.int32), self.length.ndim + 1)
        last = self.length[..., None] - 1
        # The last position of each slot that is below the length.
        newest = last - (last - slot) % self.slots
        return jnp.where(newest < 0, NO_POSITION, newest)

    def _append(
        self, key: jax.Array, value: jax.Array, lengths: jax.Array | None
    ) -> tuple[Memory, Self]:
        """Return the new tokens in stored form, and the cache with them."""
        self._check(key, value)
        count = self.count(key.shape[-3], lengths)
        length = self.length + count
        tokens = Memory.of(key, value, self.key.dtype)

        def put(x: Any, new: jax.Array) -> Any:
            if x.ndim < self.key.ndim:
                # Scales are written as slots with one feature.
                x, new = map_part(lambda x: x[..., None], x), new[..., None]
                return map_part(lambda x: x[..., 0], put(x, new))
            return write(x, new, self.length, count, self.names, self.window is not None)

        slots = vars(jax.tree.map(put, self._memory, tokens, is_leaf=is_part))
        written = None if self.written is None else jnp.maximum(self.written, length)
        return tokens, self.replace(**slots | {"length": length, "written": written})

    def _check(self, key: Any, value: Any) -> None:
        """Check that keys and values have the same number of tokens, and fit the slots."""
        for name, x, slots in (("key", key, self.key), ("value", value, self.value)):
            shape = checks.floating(name, x).shape
            *B, K, S, F = slots.shape
            T = shape[-3] if len(shape) == slots.ndim else 0
            fits = self.window is not None or symbols.at_most(T, S)
            if symbols.at_most(T, 0) or shape != (*B, T, K, F) or not fits:
                raise ValueError(
                    f"{name}s for the cache must have shape [*B, at most S, K, H] where the cache "
                    f"is [*B, K, S, H] = {slots.shape}, got {shape}; initialize the cache with the "
                    f"full batch and length"
                )
        if key.shape[-3] != value.shape[-3]:
            raise ValueError(
                f"keys and values must be of as many tokens, got key {key.shape} and value "
                f"{value.shape}; give every key its value"
            )
