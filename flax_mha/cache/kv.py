"""The cache as a value: append, attend, truncate, fork."""

from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from flax.typing import Dtype

from flax_mha import inputs, masks, shapes
from flax_mha.cache import checks, ring_buffer
from flax_mha.cache.look import Extended, look, marked
from flax_mha.cache.slots import (
    ROWS,
    SCALES,
    SLOTS,
    encode,
    stored,
    take_rows,
    write,
)
from flax_mha.kernels.stored import Stored
from flax_mha.shapes import Shape


class KVCache(struct.PyTreeNode):
    """Keys and values of the tokens so far, each row of the batch with a length of its own.

    Without a window slot j holds the token at position j. With one the slots are a ring buffer:
    the token at position p is in slot p mod S, and the last S tokens are held.

    Attributes:
      key: [*B, K, S, H], heads first, as decoding reads them.
      value: [*B, K, S, Hv].
      length: int32 [*B], tokens appended so far to each row. Zeros are an empty cache, whatever
        the slots hold.
      key_scale: float32 [*B, K, S], of int8 keys; else None.
      value_scale: likewise.
      written: int32 [*B], of a ring: the greatest length since the row was empty. Slots of tokens
        before written − S have been written over, whatever was truncated since. Else None.
      window: how many tokens before itself a token sees (`masks.Window(window, 0)`), at most
        S − 1; None for all.
    """

    key: jax.Array
    value: jax.Array
    length: jax.Array
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None
    written: jax.Array | None = None
    window: int | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def empty(
        cls,
        batch: Shape,
        slots: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        *,
        dtype: Dtype = jnp.float32,
        window: int | None = None,
    ) -> Self:
        """An empty cache.

        Args:
          batch: *B.
          slots: S, with a window at least window + 1.
          num_kv_heads: K.
          head_dim: H.
          v_head_dim: Hv (default: H).
          dtype: of keys and values, floating point or int8.
          window: see `KVCache`.

        Raises:
          ValueError, TypeError: if sizes, the window or the dtype do not fit.
        """
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        inputs.positive(
            slots=slots, num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim
        )
        batch, dtype = inputs.sizes("batch", batch), checks.dtype("dtype", dtype)
        if window is not None and inputs.integer("window", window) >= slots:
            raise ValueError(
                f"a window of {window} needs at least {window + 1} slots, got {slots}; give them"
            )
        heads = (*batch, num_kv_heads, slots)
        # Arrays of their own: one can't be donated twice.
        key_scale, value_scale = (
            jnp.zeros(heads, jnp.float32) if dtype == jnp.int8 else None for _ in range(2)
        )
        return cls(
            jnp.zeros((*heads, head_dim), dtype), jnp.zeros((*heads, v_head_dim), dtype),
            jnp.zeros(batch, jnp.int32), key_scale, value_scale,
            None if window is None else jnp.zeros(batch, jnp.int32), window,
        )  # fmt: skip

    @property
    def slots(self) -> int:
        """S."""
        return self.key.shape[-2]

    def next_positions(self, T: int) -> jax.Array:
        """Int32 [*B, T], the positions of the next T tokens of each row."""
        return self.length[..., None] + shapes.lead(
            jnp.arange(T, dtype=jnp.int32), self.length.ndim + 1
        )

    def append(self, key: jax.Array, value: jax.Array, lengths: jax.Array | None = None) -> Self:
        """Adds T ≥ 1 tokens to each row, or the first `lengths` of them.

        Args:
          key: [*B, T, K, H].
          value: [*B, T, K, Hv].
          lengths: int [*B], in 0 … T: how many tokens of each row are real (default: all). What
            is not known before tracing is clipped.

        Returns:
          The new cache. Tokens beyond the last slot are left out (without a window), and the row
          has overflowed.

        Raises:
          ValueError, TypeError: if tokens or lengths do not fit the cache.
        """
        return self._write(self._encode(key, value), lengths)

    def attend(
        self, q: jax.Array, q_positions: jax.Array, *, mask: masks.MaskLike | None = None,
        **call: Any,
    ) -> Any:  # fmt: skip
        """Attends to all tokens held, each query to those up to its own position.

        Args:
          q: [*B, T, N, H].
          q_positions: int [*B, T], such as `next_positions(T)` from before the last `append`.
          mask: joins causality and the window; of arrays the last axis is the slots.
          **call: more arguments of `dot_product_attention`; `attention`, called in its place.

        Returns:
          What `dot_product_attention` returns. Outputs of queries are NaN where tokens are missing
          that they would see: from the first on that found no slot, or which a ring has written
          over since.
        """
        given = inputs.integers("q_positions", q_positions)
        places = {"q_positions": given, "kv_positions": self._positions()}
        result = look(q, self._stored(), mask, call, self.window, **places)
        at = jnp.asarray(shapes.lead(given, self.length.ndim + 1))
        lost = self._lost(at)
        if self.window is not None and self.written is not None:
            lost |= ring_buffer.forgotten(at, self.written, self.slots, self.window)
        return marked(result, lost)

    def extend(
        self, q: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array | None = None,
        *, mask: masks.MaskLike | None = None, **call: Any,
    ) -> tuple[Any, Self]:  # fmt: skip
        """Appends tokens and attends from them to all so far, themselves included.

        Args:
          q: [*B, T, N, H], of the new tokens.
          key: [*B, T, K, H].
          value: [*B, T, K, Hv].
          lengths: see `append`. The others attend to nothing: their outputs are 0.
          mask: see `attend`.
          **call: see `attend`.

        Returns:
          (what `dot_product_attention` returns, the new cache). A token that found no slot, and all
          that follow it in its row, have outputs of NaN; those before it are as they should be.

        Raises:
          ValueError, TypeError: if shapes or dtypes do not fit.
        """
        extended, new = self.extended(key, value, lengths)
        return extended.attend(q, mask=mask, lengths=lengths, **call), new

    def extended(
        self, key: jax.Array, value: jax.Array, lengths: jax.Array | None = None
    ) -> tuple[Extended, Self]:
        """What queries of these tokens attend to, and the new cache; see `extend`."""
        tokens = self._encode(key, value)
        T = key.shape[-3]
        q_positions, new = self.next_positions(T), self._write(tokens, lengths)
        if self.window is None or self.slots >= self.window + T:
            held, k_positions = new._stored(), new._positions()
        else:
            # No room for all that these queries see: what the ring held, and the new ones.
            k, v = (
                jax.tree.map(lambda *x: jnp.concatenate(x, axis=-3), *pair)
                for pair in zip(self._stored(), tokens, strict=True)
            )
            held, old = (k, v), ring_buffer.positions(self.length, self.slots)
            k_positions = jnp.concatenate([old, q_positions], axis=-1)
        extended = Extended(
            *held, tokens, q_positions, k_positions, end=new.length, first=(self.length == 0).all(),
            lost=new._lost(q_positions), ragged=lengths is not None, window=self.window,
        )  # fmt: skip
        return extended, new

    def free(self) -> jax.Array:
        """Int32 [*B], how many more tokens each row has room for; with a window, 2³⁰ − 1 in all."""
        return jnp.maximum(self._most - self.length, 0)

    def reset(self) -> Self:
        """The cache with no token in it."""
        return self.truncate(0)

    def truncate(self, lengths: jax.Array | int) -> Self:
        """The cache with the first `lengths` (int, or int [*B]) tokens of each row, at most.

        With a window, tokens that are needed again may have been written over: a row then has
        overflowed. S − 1 − window tokens can always be taken back, and so can all.

        Raises:
          ValueError, TypeError: if lengths are no integers, have another shape, or are known to be
            negative; where they are traced, such a row has overflowed.
        """
        to = checks.remaining(lengths, self.length.shape)
        length, written = ring_buffer.truncated(
            self.length, self.written, to, self.slots, self.window
        )
        return self.replace(length=length, written=written)

    def fork(self, rows: jax.Array) -> Self:
        """The rows of that order (of the last axis of *B): beams, or copies for best-of-n.

        Args:
          rows: int [R], indices of rows.

        Raises:
          ValueError, TypeError: if they are no indices, or known to be out of range; where they
            are traced, such a row has overflowed, and stays so until it is emptied.
        """

        def take(x: jax.Array) -> jax.Array:
            # Axes after the rows: of lengths, scales, and slots.
            return take_rows(x, rows, {0: ROWS, 2: SCALES, 3: SLOTS}[x.ndim - self.length.ndim])

        return jax.tree.map(take, self)

    @property
    def overflowed(self) -> jax.Array:
        """Bool [*B]: tokens are missing that later ones would see."""
        return self.length > self._most

    @property
    def _most(self) -> int:
        return self.slots if self.window is None else ring_buffer.FAR - 1

    def _positions(self) -> jax.Array | None:
        """Int32 [*B, S], where each slot's token stands, FAR where there is none; None: slot j."""
        return None if self.window is None else ring_buffer.positions(self.length, self.slots)

    def _stored(self) -> tuple[Stored, Stored]:
        """Keys and values as kernels take them, [*B, S, K, ·]."""
        return stored(self.key, self.key_scale), stored(self.value, self.value_scale)

    def _encode(self, key: jax.Array, value: jax.Array) -> tuple[Stored, Stored]:
        """New tokens as they will be stored, [*B, T, K, ·], if they fit."""
        checks.tokens(key, value, (self.key.shape, self.value.shape), self.window is not None)
        return encode(key, self.key.dtype), encode(value, self.key.dtype)

    def _write(self, tokens: tuple[Stored, Stored], lengths: jax.Array | None) -> Self:
        T = tokens[0].shape[-3]
        count = jnp.full_like(self.length, T)
        if lengths is not None:
            count = jnp.clip(shapes.per_row("lengths", lengths, self.length.shape, T), 0, T)
        length = self.length + count

        def put(x: jax.Array, new: jax.Array) -> jax.Array:
            return write(x, new, self.length, count, self.window is not None)

        def put_scale(x: jax.Array | None, new: jax.Array | None) -> jax.Array | None:
            return None if x is None or new is None else put(x[..., None], new)[..., 0]

        key, value = tokens
        return self.replace(
            key=put(self.key, key.values),
            value=put(self.value, value.values),
            key_scale=put_scale(self.key_scale, key.scale),
            value_scale=put_scale(self.value_scale, value.scale),
            length=length,
            written=None if self.written is None else jnp.maximum(self.written, length),
        )

    def _lost(self, positions: jax.Array) -> jax.Array:
        """Whether the tokens at those positions [*B, T] found no slot, or some before them."""
        return self.overflowed[..., None] & (positions >= self._most)
