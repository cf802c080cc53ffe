"""Slots of a cache: how tokens are encoded, and written where they belong."""

import jax
import jax.numpy as jnp

from flax_mha import sharding
from flax_mha.cache import checks
from flax_mha.cache.ring_buffer import FAR
from flax_mha.inputs import Integers
from flax_mha.kernels.stored import Stored
from flax_mha.sharding import LogicalNames

# Arrays over slots, heads first, and their scales; those over new tokens; those of rows.
SLOTS: LogicalNames = ("batch", "kv_heads", None, None)
SCALES: LogicalNames = ("batch", "kv_heads", None)
_TOKENS: LogicalNames = ("batch", None, "kv_heads", None)
ROWS: LogicalNames = ("batch",)


def encode(x: jax.Array, dtype: jnp.dtype) -> Stored:
    """Tokens in the dtype of a cache, with their scale.

    int8: of each token and head the greatest magnitude is 127 steps, and every feature the nearest
    step, so that |x − values·scale| ≤ max|x| / 254.

    Args:
      x: [*B, T, K, H], floating point.
      dtype: int8, or a floating one.

    Returns:
      Values [*B, T, K, H], and for int8 a scale float32 [*B, T, K, 1].
    """
    if dtype != jnp.int8:
        return Stored(x.astype(dtype), None, jnp.float32)
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
    steps = jnp.round(x / jnp.where(scale == 0, 1.0, scale))
    return Stored(jnp.clip(steps, -127, 127).astype(jnp.int8), scale, jnp.float32)


def write(
    slots: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array, wraps: bool
) -> jax.Array:
    """The slots with token t of each row in slot start + t, for t < count.

    Args:
      slots: [*B, K, S, F].
      tokens: [*B, T, K, F], of the same dtype.
      start: int32 [*B], at least 0.
      count: int32 [*B], of the row's tokens from its first on.
      wraps: whether slot S is slot 0 again, so that the last S tokens stay. Else tokens beyond
        the last slot are left out.
    """
    fn = _ring if wraps else _line
    for _ in start.shape:
        fn = jax.vmap(fn)
    rank = start.ndim
    names = [SLOTS, _TOKENS, ROWS[:rank], ROWS[:rank]]
    # Each device writes into its own slots: none are sent.
    args = [
        sharding.constrain(x, n) for x, n in zip((slots, tokens, start, count), names, strict=True)
    ]
    return sharding.local(fn, names, (slots.shape, SLOTS), *args)


def _line(slots: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    return _put(slots, jnp.swapaxes(tokens, 0, 1), start, jnp.int32(0), count)


def _ring(slots: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    S, T = slots.shape[1], tokens.shape[0]
    tokens = jnp.swapaxes(tokens, 0, 1)
    if T > S:
        skipped = jnp.maximum(count - S, 0)
        tokens = jax.lax.dynamic_slice_in_dim(tokens, skipped, S, axis=1)
        start, count = start + skipped, count - skipped
    start = start % S
    slots = _put(slots, tokens, start, jnp.int32(0), count)
    # What reaches beyond the last slot goes on at the first.
    return slots if T == 1 else _put(slots, tokens, start - S, S - start, count)


def _put(
    slots: jax.Array, tokens: jax.Array, start: jax.Array, first: jax.Array, end: jax.Array
) -> jax.Array:
    """Slots [K, S, F] with token t of [K, T ≤ S, F] in slot start + t, for first ≤ t < end.

    One window of T slots is read and written, the one nearest to those that are meant.
    """
    S, T = slots.shape[1], tokens.shape[1]
    at = jnp.clip(start, 0, S - T)
    t = jnp.arange(T, dtype=jnp.int32) + at - start
    if T > 1:
        tokens = jnp.take(tokens, jnp.clip(t, 0, T - 1), axis=1)
    window = jax.lax.dynamic_slice_in_dim(slots, at, T, axis=1)
    meant = ((t >= first) & (t < end))[None, :, None]
    window = jnp.where(meant, tokens, window)
    return jax.lax.dynamic_update_slice_in_dim(slots, window, at, axis=1)


def stored(x: jax.Array, scale: jax.Array | None) -> Stored:
    """Slots [*B, K, S, H] and their scale [*B, K, S] as kernels take them, [*B, S, K, ·]."""
    scale = None if scale is None else jnp.swapaxes(scale, -1, -2)[..., None]
    return Stored(jnp.swapaxes(x, -3, -2), scale, jnp.float32)


def take_rows(x: jax.Array, rows: Integers, names: LogicalNames) -> jax.Array:
    """Some rows of an array of a cache; one that does not exist gives a length of FAR.

    Args:
      x: [..., *names], rows of the batch first among those.
      rows: int [R].
      names: of its last axes.

    Raises:
      ValueError, TypeError: if they are no indices, or known to be out of range.
    """
    axis, fill = x.ndim - len(names), FAR if x.dtype == jnp.int32 else 0
    rows = checks.rows(rows, x.shape[: axis + 1])

    def take(x: jax.Array, rows: jax.Array) -> jax.Array:
        # To `take` negative indices count from the end.
        rows = jnp.where(rows < 0, x.shape[axis], rows)
        return jnp.take(x, rows, axis=axis, mode="fill", fill_value=fill)

    return sharding.auto(take, names, x, rows)
