"""The cache as a value: append, attend, truncate, fork."""

from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from flax.typing import Dtype

from flax_mha import masks
from flax_mha.base import checks, shapes, symbols
from flax_mha.base.shapes import Shape
from flax_mha.cache.extended import Extended, attend_causally, nan_where_lost
from flax_mha.cache.storage import NO_POSITION, Memory, Slots, write


class KVCache(Slots, struct.PyTreeNode):
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
        checks.positive(
            slots=slots, num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim
        )
        batch = checks.sizes("batch", batch)
        dtype = checks.dtype("dtype", dtype, "a floating dtype or int8")
        if window is not None and checks.integer("window", window) >= slots:
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
        if not symbols.is_symbolic(T):
            checks.integer("T", T)
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
        return self._append(key, value, lengths)[1]

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
        positions = checks.integers("q_positions", q_positions)
        k_positions = None if self.window is None else self._positions()
        places = {"q_positions": positions, "kv_positions": k_positions}
        result = attend_causally(q, self.stored(), mask, call, self.window, **places)
        at = jnp.asarray(shapes.lead(positions, self.length.ndim + 1))
        lost = self._lost(at)
        if self.window is not None and self.written is not None:
            # Of the tokens that they see the first may have been written over.
            lost |= jnp.maximum(at - self.window, 0) < self.written[..., None] - self.slots
        return nan_where_lost(result, lost)

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
        tokens, new = self._append(key, value, lengths)
        T = key.shape[-3]
        q_positions = self.next_positions(T)
        held, k_positions = new._held, None
        if self.window is not None and self.slots >= self.window + T:
            k_positions = new._positions()
        elif self.window is not None:
            # No room for all that these queries see: what the ring held, and the new ones.
            axis = self.length.ndim + 1
            held = jax.tree.map(lambda *x: jnp.concatenate(x, axis), self._held, tokens)
            k_positions = jnp.concatenate([self._positions(), q_positions], axis=-1)
        extended = Extended(
            *held.stored(), tokens.stored(), q_positions, k_positions, new.length,
            new._lost(q_positions), ragged=lengths is not None, window=self.window,
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
        to, batch = checks.integers("lengths", lengths), self.length.shape
        if to.shape != batch[len(batch) - to.ndim :]:
            raise ValueError(
                f"lengths must be one number or have shape [*B] = {batch}, got {to.shape}; "
                f"give one number for each row of the batch"
            )
        remedy = "give how many tokens stay, such as length - 1 to take one back"
        checks.within("lengths", to, None, remedy)
        to = jnp.asarray(shapes.lead(to, len(batch)))
        length, written = jnp.minimum(self.length, to), self.written
        if self.window is None or written is None:
            lost = (self.length >= NO_POSITION) & (length > 0)
        else:
            # Tokens from here on are seen by those to come.
            first = jnp.maximum(length - self.window, 0)
            lost = first < jnp.minimum(length, written - self.slots)
            written = jnp.where(length == 0, 0, written)
        lost |= to < 0
        return self.replace(
            length=jnp.where(lost, NO_POSITION, length),
            written=None if written is None else jnp.where(lost, NO_POSITION, written),
        )

    @property
    def overflowed(self) -> jax.Array:
        """Bool [*B]: tokens are missing that later ones would see."""
        return self.length > self._most

    @property
    def _most(self) -> int:
        return self.slots if self.window is None else NO_POSITION - 1

    def _lost(self, positions: jax.Array) -> jax.Array:
        """Whether the tokens at those positions [*B, T] found no slot, or some before them."""
        return self.overflowed[..., None] & (positions >= self._most)

    @property
    def _held(self) -> Memory:
        return Memory(self.key, self.value, self.key_scale, self.value_scale)

    def _positions(self) -> jax.Array:
        """Int32 [*B, S], where the token in each slot of a ring stands, FAR where there is none."""
        slot = shapes.lead(jnp.arange(self.slots, dtype=jnp.int32), self.length.ndim + 1)
        last = self.length[..., None] - 1
        # The last of each slot's positions before the length.
        newest = last - (last - slot) % self.slots
        return jnp.where(newest < 0, NO_POSITION, newest)

    def _append(
        self, key: jax.Array, value: jax.Array, lengths: jax.Array | None
    ) -> tuple[Memory, Self]:
        """New tokens as they are stored, and the cache with them."""
        self._check(key, value)
        T = key.shape[-3]
        count = jnp.full_like(self.length, T)
        if lengths is not None:
            count = jnp.clip(shapes.per_row("lengths", lengths, self.length.shape, T), 0, T)
        length = self.length + count
        tokens = Memory.of(key, value, self.key.dtype)

        def put(x: jax.Array, new: jax.Array) -> jax.Array:
            if x.ndim < self.key.ndim:
                # Scales are slots of one feature.
                return put(x[..., None], new[..., None])[..., 0]
            return write(x, new, self.length, count, self.window is not None)

        slots = vars(jax.tree.map(put, self._held, tokens))
        written = None if self.written is None else jnp.maximum(self.written, length)
        return tokens, self.replace(**slots, length=length, written=written)

    def _check(self, key: Any, value: Any) -> None:
        """Keys and values must be of as many tokens, and fit the slots."""
        for name, x, slots in (("key", key, self.key), ("value", value, self.value)):
            came = checks.floating(name, x).shape
            *B, K, S, F = slots.shape
            T = came[-3] if len(came) == slots.ndim else 0
            fits = self.window is not None or symbols.at_most(T, S)
            if symbols.at_most(T, 0) or came != (*B, T, K, F) or not fits:
                raise ValueError(
                    f"{name}s for the cache must have shape [*B, at most S, K, H] where the cache "
                    f"is [*B, K, S, H] = {slots.shape}, got {came}; initialize the cache with the "
                    f"full batch and length"
                )
        if key.shape[-3] != value.shape[-3]:
            raise ValueError(
                f"keys and values must be of as many tokens, got key {key.shape} and value "
                f"{value.shape}; give every key its value"
            )
