"""Keys and values in slots, heads first: encoding, writing, reading and reordering."""

import functools
import math
from collections.abc import Callable
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype
from jax.tree_util import Partial

from flax_mha import sharding
from flax_mha.base import checks, shapes, symbols
from flax_mha.base.checks import Integers
from flax_mha.base.shapes import Shape
from flax_mha.base.trees import Struct
from flax_mha.cache.format import Format, finite, nan_flag
from flax_mha.cache.sources import KeyValue, Source, Tokens
from flax_mha.kernels.call.stored import OfLayer, Stored, is_part, map_part, read
from flax_mha.sharding import LogicalNames, rules

AnySlots = TypeVar("AnySlots", bound="Slots")

# The position of an empty slot, and the length of an overflowed row: beyond any token.
NO_POSITION = 2**30
# Up to so many tokens are written one by one.
_FEW = 64


class Slots(Source):
    """The keys and values of tokens, the base of `KVCache` and `Memory`."""

    key: jax.Array
    value: jax.Array
    key_scale: jax.Array | None
    value_scale: jax.Array | None
    length: Any

    @property
    def names(self) -> LogicalNames:
        """The logical names of the last axes of keys. Scales and lengths have the first of them."""
        return "batch", "kv_heads", None, None

    def stored(self) -> tuple[Stored, Stored]:
        """Return keys and values in the form that kernels read, [*B, S, K, ·]."""

        def as_stored(x: Any, scale: Any) -> Stored:
            slots = self.names[2] or "length"
            if scale is not None:
                scale = map_part(lambda x: jnp.swapaxes(x[..., None], -3, -2), scale)
            x = map_part(lambda x: jnp.swapaxes(x, -3, -2), x)
            return Stored(x, scale, jnp.float32, slots)

        return as_stored(self.key, self.key_scale), as_stored(self.value, self.value_scale)

    def next_positions(self, T: int) -> jax.Array:
        """Return the positions of the next T queries of each row, int32 [*B, T]."""
        if not symbols.is_symbolic(T):
            checks.integer("T", T)
        index = jnp.arange(T, dtype=jnp.int32)
        return self.length[..., None] + shapes.lead(index, self.length.ndim + 1)

    def count(self, T: int, lengths: jax.Array | None) -> jax.Array:
        """Return the number of real tokens of a call of T tokens in each row, int32 [*B]."""
        if lengths is None:
            return jnp.full_like(self.length, T)
        return jnp.clip(shapes.per_row("lengths", lengths, self.length.shape, T), 0, T)

    def kept_lengths(self, lengths: Any) -> jax.Array:
        """Check the `lengths` of `truncate`, int or int [*B], and return them as int32 [*B|1]."""
        keep, batch = checks.integers("lengths", lengths), self.length.shape
        if keep.shape != batch[len(batch) - keep.ndim :]:
            raise ValueError(
                f"lengths must be one number or have shape [*B] = {batch}, got {keep.shape}; "
                f"give one number for each row of the batch"
            )
        remedy = "give the number of tokens to keep, such as length - 1 to drop one"
        checks.within("lengths", keep, None, remedy)
        return jnp.asarray(shapes.lead(keep, len(batch)))

    def fork(self, rows: jax.Array) -> Self:
        """Return the cache with some rows of the batch: beams, or copies for best-of-n.

        Args:
          rows: int [R], indices into the last axis of *B.

        Raises:
          ValueError, TypeError: if rows are not valid indices. A traced index out of range gives an
            overflowed row, until the row is reset.
        """
        batch = self.key.ndim - 3
        indices, axis = _check_rows(rows, self.key.shape[:batch]), batch - 1

        def take(x: jax.Array, rows: jax.Array) -> jax.Array:
            # For `take`, negative indices count from the end.
            rows = jnp.where(rows < 0, x.shape[axis], rows)
            fill = NO_POSITION if x.dtype == jnp.int32 else 0
            return jnp.take(x, rows, axis=axis, mode="fill", fill_value=fill)

        return map_by_names(lambda x, names: sharding.auto(take, names, x, indices), self)


class Memory(Slots, Struct):
    """Stored keys and values of tokens, heads first, such as an encoder's, projected once.

    Queries attend to them call by call, and continue at their own positions. A memory without keys
    takes those of the next call.

    Attributes:
      key: [*B, K, S, H], with a NaN where the token's value is not finite; None for a memory that
        is to be made.
      value: [*B, K, S, Hv], finite, because a weight of 0 would not hide NaN.
      key_scale: the scales of keys in 8 bits, float32 [*B, K, S]; else None.
      value_scale: the scales of values in 8 bits, float32 [*B, K, S]; else None.
      length: int32 [*B], the number of queries so far: the position of the next one; None if no
        queries are counted. 0, a number, of a memory that is to be made: count from the first call.
    """

    key: Any
    value: Any
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None
    length: Any = None
    is_given = True
    variable = "memory"

    def next_positions(self, T: int) -> Any:
        """Return the positions of the next T queries, int32 [*B, T]; None if none are counted."""
        is_counted = hasattr(self.length, "shape")
        return super().next_positions(T) if is_counted else None

    def open(self, tokens: Tokens) -> tuple[KeyValue, Self]:
        """Return the keys and values, or else those of the call, and the memory after it."""
        k, v = tokens.new.own()
        memory, length = self, self.length
        if self.key is None:
            memory = self.of(k, v, tokens.dtype or k.dtype)
            if not hasattr(length, "shape"):
                length = jnp.zeros(memory.key.shape[:-3], jnp.int32)
        source = KeyValue(*memory.stored(), q_positions=self.next_positions(tokens.T))
        memory = memory.replace(length=length)
        if self.length is not None:
            memory = memory.replace(length=length + memory.count(tokens.T, tokens.lengths))
        return source, memory

    def truncate(self, lengths: jax.Array | int) -> Self:
        """Return the same keys and values, with at most the first `lengths` queries counted."""
        return self.replace(length=jnp.minimum(self.length, self.kept_lengths(lengths)))

    @classmethod
    def of(cls, key: jax.Array, value: jax.Array, dtype: Dtype) -> Self:
        """Encode keys [*B, S, K, H] and values [*B, S, K, Hv] in a dtype."""
        form = Format.checked("dtype", dtype)
        # In one feature: the others may hold more than the key, as in forgetting attention.
        is_first = shapes.lead(np.arange(key.shape[-1]) == 0, key.ndim)
        key = jnp.where(is_first, key + nan_flag(value)[..., None].astype(key.dtype), key)
        value = finite(value)
        (key, key_scale), (value, value_scale) = map(form.encode, (key, value))
        return cls(key, value, key_scale, value_scale)


def map_by_names(fn: Callable[[jax.Array, LogicalNames], jax.Array], slots: AnySlots) -> AnySlots:
    """Apply fn to each array of a cache and the logical names of its last axes."""
    batch = slots.key.ndim - 3

    def apply(x: Any) -> Any:
        return map_part(lambda y: fn(y, slots.names[: x.ndim - batch + 1]), x)

    return jax.tree.map(apply, slots, is_leaf=is_part)


def write(
    slots: Any, tokens: jax.Array, start: jax.Array, count: jax.Array, names: LogicalNames,
    wraps: bool,
) -> Any:  # fmt: skip
    """Write token t of each row into slot start + t, for t < count, and return the slots.

    slots are [*B, K, S, F] with logical `names`, or a layer's part, tokens [*B, K, T, F] in the
    same dtype, start (at least 0) and count int32 [*B]. If the cache wraps (a ring buffer), slot S
    is slot 0, and the last S tokens stay. Otherwise tokens beyond the last slot are dropped.
    """
    axes = rules.unpack_entry(sharding.spec(slots.shape, names)[-2])
    stack, *layer = (slots.stack, slots.layer) if is_part(slots) else (slots,)
    arguments = stack, tokens, start, count, *layer
    all_names = [names, (*names[:2], None, None), names[:1], names[:1], *[()] * len(layer)]
    # Each device writes into its own shard, without communication.
    args = [sharding.constrain(x, n) for x, n in zip(arguments, all_names, strict=True)]
    on_shard = Partial(_write_shard, axes, wraps)
    written = sharding.local(on_shard, all_names, (stack.shape, names), *args)
    return slots.replace(stack=written) if layer else written


def _write_shard(
    axes: tuple[str, ...], wraps: bool, slots: jax.Array, tokens: jax.Array, start: jax.Array,
    count: jax.Array, *layer: jax.Array,
) -> jax.Array:  # fmt: skip
    first = jax.lax.axis_index(axes) * slots.shape[-2] if axes else 0
    return _write_rows(wraps, slots, tokens, start - first, count, *layer)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _write_rows(
    wraps: bool, slots: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array,
    *layer: jax.Array,
) -> jax.Array:  # fmt: skip
    T = tokens.shape[-2]
    if symbols.at_most(T, _FEW) and (not wraps or symbols.at_most(T, slots.shape[-2])):
        return _write_few(wraps, slots, tokens, start, count, *layer)
    fn = _wrap if wraps else _write
    for _ in start.shape:
        fn = jax.vmap(fn)
    if not layer:
        return fn(slots, tokens, start, count)
    written = fn(read(OfLayer(slots, *layer)), tokens, start, count)
    return jax.lax.dynamic_update_index_in_dim(slots, written, *layer, 0)


def _write_few(
    wraps: bool, slots: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array,
    *layer: jax.Array,
) -> jax.Array:  # fmt: skip
    """Write tokens one by one, in place on every machine.

    For a window of slots, which is read first, libtpu transposes all slots.
    """
    R, (K, S, F), T = math.prod(start.shape), slots.shape[-3:], tokens.shape[-2]
    rows = slots.reshape(*slots.shape[: len(layer)], R, K, S, F)
    start, count = start.reshape(R, 1, 1), count.reshape(R, 1, 1)
    row, head, t = (jnp.arange(n, dtype=jnp.int32) for n in (R, K, T))
    t = t[None, None]
    at = (start + t) % S if wraps else start + t
    # Others are dropped, each at a place of its own.
    at = jnp.where((t < count) & (start + t >= 0), at, S + t)
    places = *layer, row[:, None, None], head[None, :, None], at
    written = rows.at[places].set(tokens.reshape(R, K, T, F), mode="drop", unique_indices=True)
    return written.reshape(slots.shape)


def _wrap(slots: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    S, T = slots.shape[1], tokens.shape[1]
    if not symbols.at_most(T, S):
        skipped = jnp.maximum(count - S, 0)
        tokens = jax.lax.dynamic_slice_in_dim(tokens, skipped, S, axis=1)
        start, count = start + skipped, count - skipped
    start = start % S
    slots = _write(slots, tokens, start, count)
    # Tokens beyond the last slot continue at slot 0.
    return _write(slots, tokens, start - S, count)


def _write(slots: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    """Write token t of [K, T, F] into slot start + t of [K, S, F].

    One window of at most T slots is read and written. Slots that do not exist are left out.
    """
    S, T = slots.shape[1], tokens.shape[1]
    size = T if symbols.at_most(T, S) else S
    first = jnp.clip(start, 0, S - size)
    t = jnp.arange(size, dtype=jnp.int32) + first - start
    tokens = jnp.take(tokens, jnp.clip(t, 0, T - 1), axis=1)
    window = jax.lax.dynamic_slice_in_dim(slots, first, size, axis=1)
    is_written = ((t >= 0) & (t < count))[None, :, None]
    window = jnp.where(is_written, tokens, window)
    return jax.lax.dynamic_update_slice_in_dim(slots, window, first, axis=1)


def _check_rows(rows: Integers, batch: Shape) -> Integers:
    """Check the indices [R] of rows of the batch's last axis, and convert them to int32."""
    if not batch:
        raise ValueError(
            "fork takes rows of a batch, and this cache has no batch axis; give it one of size 1"
        )
    leaves = jax.tree.leaves(rows)
    if any(isinstance(x, bool) or getattr(x, "dtype", None) == np.bool_ for x in leaves):
        raise TypeError(
            "rows must be indices of rows, got bools; of a mask give np.flatnonzero(mask)"
        )
    indices = checks.integers("rows", rows)
    if indices.ndim != 1 or not indices.size:
        raise ValueError(
            f"rows must have shape [R], got {indices.shape}: at least one index of a row; "
            f"give one row as jnp.array([row])"
        )
    checks.within("rows", indices, batch[-1], "give indices of existing rows")
    return indices
