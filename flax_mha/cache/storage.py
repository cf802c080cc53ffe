"""Keys and values over slots, heads first: how they are encoded, written, read and reordered."""

from collections.abc import Callable
from typing import Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha import sharding
from flax_mha.base import checks, symbols
from flax_mha.base.checks import Integers
from flax_mha.base.shapes import Shape
from flax_mha.kernels.stored import Stored
from flax_mha.sharding import LogicalNames

AnySlots = TypeVar("AnySlots", bound="Slots")

# Beyond the position of any token: that of a slot which holds none, and the length of a row whose
# tokens are lost.
NO_POSITION = 2**30
# The axes of slots, from the last of the batch on; scales and lengths have the first of them.
_NAMES: LogicalNames = ("batch", "kv_heads", None, None)


class Slots:
    """Keys and values of tokens, as a `KVCache` and a `Memory` have them."""

    key: jax.Array
    value: jax.Array
    key_scale: jax.Array | None
    value_scale: jax.Array | None

    def stored(self) -> tuple[Stored, Stored]:
        """Keys and values as kernels take them, [*B, S, K, ·]."""
        return _stored(self.key, self.key_scale), _stored(self.value, self.value_scale)

    def fork(self, rows: jax.Array) -> Self:
        """The rows of that order (of the last axis of *B): beams, or copies for best-of-n.

        Args:
          rows: int [R], indices of rows.

        Raises:
          ValueError, TypeError: if they are no indices, or known to be out of range; where they
            are traced, such a row has overflowed, and stays so until it is emptied.
        """
        batch = self.key.ndim - 3
        indices, axis = _indices(rows, self.key.shape[:batch]), batch - 1

        def take(x: jax.Array, rows: jax.Array) -> jax.Array:
            # To `take` negative indices count from the end.
            rows = jnp.where(rows < 0, x.shape[axis], rows)
            fill = NO_POSITION if x.dtype == jnp.int32 else 0
            return jnp.take(x, rows, axis=axis, mode="fill", fill_value=fill)

        return by_names(lambda x, names: sharding.auto(take, names, x, indices), self)


class Memory(Slots, struct.PyTreeNode):
    """Keys and values of tokens, heads first: an encoder's, projected once, or a call's new ones.

    Attributes:
      key: [*B, K, S, H].
      value: [*B, K, S, Hv].
      key_scale: float32 [*B, K, S], of int8 keys; else None.
      value_scale: likewise.
    """

    key: jax.Array
    value: jax.Array
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None

    @classmethod
    def of(cls, key: jax.Array, value: jax.Array, dtype: jnp.dtype) -> Self:
        """That of keys [*B, S, K, H] and values [*B, S, K, Hv], stored in that dtype."""
        (key, key_scale), (value, value_scale) = (_encode(x, dtype) for x in (key, value))
        return cls(key, value, key_scale, value_scale)


def by_names(fn: Callable[[jax.Array, LogicalNames], jax.Array], held: AnySlots) -> AnySlots:
    """Applies fn to each array of a cache and the logical names of its last axes."""
    batch = held.key.ndim - 3
    return jax.tree.map(lambda x: fn(x, _NAMES[: x.ndim - batch + 1]), held)


def write(
    slots: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array, wraps: bool
) -> jax.Array:
    """The slots with token t of each row in slot start + t, for t < count.

    Args:
      slots: [*B, K, S, F].
      tokens: [*B, K, T, F], of the same dtype.
      start: int32 [*B], at least 0.
      count: int32 [*B], of the row's tokens from its first on.
      wraps: whether slot S is slot 0 again, so that the last S tokens stay. Else tokens beyond
        the last slot are left out.
    """
    fn = _ring if wraps else _put
    for _ in start.shape:
        fn = jax.vmap(fn)
    arguments = slots, tokens, start, count
    names = [_NAMES, _NAMES, _NAMES[:1], _NAMES[:1]]
    # Each device writes into its own slots: none are sent.
    args = [sharding.constrain(x, n) for x, n in zip(arguments, names, strict=True)]
    return sharding.local(fn, names, (slots.shape, _NAMES), *args)


def _ring(slots: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    S, T = slots.shape[1], tokens.shape[1]
    if not symbols.at_most(T, S):
        skipped = jnp.maximum(count - S, 0)
        tokens = jax.lax.dynamic_slice_in_dim(tokens, skipped, S, axis=1)
        start, count = start + skipped, count - skipped
    start = start % S
    slots = _put(slots, tokens, start, count)
    # What reaches beyond the last slot goes on at the first.
    return slots if T == 1 else _put(slots, tokens, start - S, count)


def _put(slots: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    """Slots [K, S, F] with token t of [K, T ≤ S, F] in slot start + t, if there is one.

    One window of T slots is read and written, the one nearest to those that are meant.
    """
    S, T = slots.shape[1], tokens.shape[1]
    at = jnp.clip(start, 0, S - T)
    t = jnp.arange(T, dtype=jnp.int32) + at - start
    if T != 1:
        tokens = jnp.take(tokens, jnp.clip(t, 0, T - 1), axis=1)
    window = jax.lax.dynamic_slice_in_dim(slots, at, T, axis=1)
    meant = ((t >= 0) & (t < count))[None, :, None]
    window = jnp.where(meant, tokens, window)
    return jax.lax.dynamic_update_slice_in_dim(slots, window, at, axis=1)


def _encode(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array | None]:
    """Tokens [*B, T, K, F] as slots [*B, K, T, F] of that dtype, and for int8 a scale [*B, K, T].

    int8: of each token and head the greatest magnitude is 127 steps, and every feature the nearest
    step, so that |x − values·scale| ≤ max|x| / 254.
    """
    x = jnp.swapaxes(x, -3, -2)
    if dtype != jnp.int8:
        return x.astype(dtype), None
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127
    steps = jnp.round(x / jnp.where(scale == 0, 1.0, scale)[..., None])
    return jnp.clip(steps, -127, 127).astype(jnp.int8), scale


def _stored(x: jax.Array, scale: jax.Array | None) -> Stored:
    """Slots [*B, K, S, F] and their scale [*B, K, S] as kernels take them, [*B, S, K, ·]."""
    scale = None if scale is None else jnp.swapaxes(scale[..., None], -3, -2)
    return Stored(jnp.swapaxes(x, -3, -2), scale, jnp.float32)


def _indices(rows: Integers, batch: Shape) -> Integers:
    """Indices of some rows of the batch (its last axis), int32 [R]."""
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
    checks.within("rows", indices, batch[-1], "name rows that there are")
    return indices
