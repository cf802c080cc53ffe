"""The slots of a cache: number formats, and writing tokens into slots in place."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Dtype
from jax import lax
from jax.tree_util import Partial

from flax_mha import sharding
from flax_mha.base import shapes, symbols
from flax_mha.base.shapes import Shape
from flax_mha.kernels.call.stored import OfLayer, Stored, cast, is_part, map_part, read
from flax_mha.sharding import LogicalNames, devices, rules

# The position of an empty slot, and the length of an overflowed row: beyond any token.
NO_POSITION = 2**30
# Calls of at most this many tokens write them one by one.
_FEW = 64
# The numbers that a TPU's vectors have along the last axis.
_LANES = 128
# A TPU's program writes so many tokens without a loop, counted for each block that is written. More
# take long to compile.
_UNROLLED = 96
# The dtypes of 8 bits, whose slots have scales, and the number that a token's largest is scaled to.
_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
EIGHT_BITS = tuple(_LARGEST)


def has_scales(dtype: Any) -> bool:
    """Return True for a dtype of 8 bits, whose slots have a scale for each token and head."""
    return jnp.dtype(dtype).name in _LARGEST


def positions_from(start: jax.Array, T: int) -> jax.Array:
    """Return the positions of T tokens of each row, the first of which is at start [*B]."""
    return start[..., None] + shapes.lead(jnp.arange(T, dtype=jnp.int32), start.ndim + 1)


def encode(key: jax.Array, value: jax.Array, dtype: Dtype) -> dict[str, jax.Array]:
    """Convert keys [*B, T, K, H] and values [*B, T, K, Hv] to the arrays of a `KVCache`.

    Values become finite, because a weight of 0 would not hide NaN. A token whose value is not
    finite gets a NaN in its key instead, which masks can hide.
    """
    # 0 for a finite value, else NaN. A matmul, because XLA:CPU is far slower at sums, and at `all`,
    # over a short last axis.
    zeros, last = lax.full(value.shape[-1:], 0, value.dtype), value.ndim - 1
    flag = lax.dot_general(lax.stop_gradient(value), zeros, (((last,), (0,)), ((), ())))
    # Only in the first feature: forgetting attention keeps other numbers in the last ones.
    is_first = shapes.lead(np.arange(key.shape[-1]) == 0, key.ndim)
    key = jnp.where(is_first, key + flag[..., None].astype(key.dtype), key)
    return _to_slots("key", key, dtype) | _to_slots("value", _finite(value), dtype)


def _to_slots(name: str, x: jax.Array, dtype: Dtype) -> dict[str, jax.Array]:
    """Convert tokens [*B, T, K, F] to slots [*B, K, T, F], and scales [*B, K, T] if it has 8 bits.

    Finite numbers are clipped to the dtype's range. With scales all slots are finite, and a token
    that is not finite has a NaN scale. In int8, |x − slots·scale| ≤ max|x| / 254.
    """
    x = jnp.swapaxes(x, -3, -2)
    if not has_scales(dtype):
        return {name: cast(x, dtype)}
    x, largest = cast(x, jnp.float32), _LARGEST[jnp.dtype(dtype).name]
    most = jnp.max(jnp.abs(x), axis=-1)
    scale = jnp.where(jnp.isfinite(most), most / largest, jnp.nan)
    steps = _finite(x / jnp.where(scale > 0, scale, 1.0)[..., None])
    steps = jnp.clip(steps, -largest, largest)
    steps = jnp.round(steps) if dtype == jnp.int8 else steps
    return {name: steps.astype(dtype), f"{name}_scale": scale}


def _finite(x: jax.Array) -> jax.Array:
    """Replace infinities and NaN by 0."""
    return lax.select(lax.is_finite(x), x, lax.full_like(x, 0))


def stored(arrays: dict[str, Any], slots: str = "length") -> tuple[Stored, Stored]:
    """Return keys and values as kernels read them, [*B, S, K, ·]. `slots` is the name of S."""

    def heads_last(x: Any) -> Any:
        return map_part(lambda y: jnp.swapaxes(y, -3, -2), x)

    def part(name: str) -> Stored:
        scale = arrays.get(f"{name}_scale")
        if scale is not None:
            scale = heads_last(map_part(lambda x: x[..., None], scale))
        return Stored(heads_last(arrays[name]), scale, jnp.float32, slots)

    return part("key"), part("value")


def write(
    slots: Any, tokens: jax.Array, start: jax.Array, count: jax.Array, names: LogicalNames,
    wraps: bool,
) -> Any:  # fmt: skip
    """Write token t of each row into slot start + t, for t < count, and return the slots.

    Slots are [*B, K, S, F], or one layer's part of them, and tokens [*B, K, T, F]; scales have no
    axis F. `wraps` is True for a ring buffer. Otherwise tokens beyond the last slot are dropped.
    """
    if slots.ndim == tokens.ndim == start.ndim + 2:
        # Scales are written as slots with one feature.
        slots, tokens = map_part(lambda x: x[..., None], slots), tokens[..., None]
        return map_part(lambda x: x[..., 0], write(slots, tokens, start, count, names, wraps))
    axes = rules.unpack_entry(sharding.spec(slots.shape, names)[-2])
    stack, *layer = (slots.stack, slots.layer) if is_part(slots) else (slots,)
    arguments = stack, tokens, start, count, *layer
    all_names = [names, (*names[:2], None, None), names[:1], names[:1], *[()] * len(layer)]
    # Each device writes into its own shard, without communication.
    args = [sharding.constrain(x, n) for x, n in zip(arguments, all_names, strict=True)]
    on_shard = Partial(_write_shard, axes, wraps)
    written = sharding.local(on_shard, all_names, (stack.shape, names), *args)
    return slots.replace(stack=written) if layer else written


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _write_shard(
    axes: tuple[str, ...], wraps: bool, slots: jax.Array, tokens: jax.Array, start: jax.Array,
    count: jax.Array, *layer: jax.Array,
) -> jax.Array:  # fmt: skip
    """Write tokens into a device's slots, whose axis is sharded over the mesh `axes`."""
    T = tokens.shape[-2]
    if axes:
        start = start - lax.axis_index(axes) * slots.shape[-2]
    if symbols.at_most(T, _FEW) and (not wraps or symbols.at_most(T, slots.shape[-2])):
        write_few = _write_blocks if _in_lanes(slots.shape) else _write_few
        return write_few(wraps, slots, tokens, start, count, *layer)
    fn: Callable[..., jax.Array] = functools.partial(_write_many, wraps)
    for _ in start.shape:
        fn = jax.vmap(fn)
    if not layer:
        return fn(slots, tokens, start, count)
    written = fn(read(OfLayer(slots, *layer)), tokens, start, count)
    return lax.dynamic_update_index_in_dim(slots, written, *layer, 0)


def _write_few(
    wraps: bool, slots: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array,
    *layer: jax.Array,
) -> jax.Array:  # fmt: skip
    """Write tokens one by one. If a window is read first, libtpu transposes all slots."""
    R, (K, S, F), T = math.prod(start.shape), slots.shape[-3:], tokens.shape[-2]
    rows = slots.reshape(*slots.shape[: len(layer)], R, K, S, F)
    start, count = start.reshape(R, 1, 1), count.reshape(R, 1, 1)
    row, head, t = (jnp.arange(n, dtype=jnp.int32) for n in (R, K, T))
    t = t[None, None]
    at = (start + t) % S if wraps else start + t
    # Every other token gets a place of its own beyond the slots, where it is dropped.
    at = jnp.where((t < count) & (start + t >= 0), at, S + t)
    places = *layer, row[:, None, None], head[None, :, None], at
    written = rows.at[places].set(tokens.reshape(R, K, T, F), mode="drop", unique_indices=True)
    return written.reshape(slots.shape)


def _in_lanes(shape: Shape) -> bool:
    """Return True if libtpu keeps slots [..., S, F] with S in the lanes, in whole blocks.

    A scatter, which wants the features there, copies them, except for scales of one feature.
    """
    *_, S, F = shape
    device = devices.current_platform()
    # XLA would divide a loop over rows badly.
    is_local = device.name == "tpu" and device.not_partitionable is None
    is_narrow = F != 1 and F % _LANES != 0
    return is_local and is_narrow and not symbols.is_symbolic(S) and S % _LANES == 0


def _write_blocks(
    wraps: bool, slots: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array,
    *layer: jax.Array,
) -> jax.Array:  # fmt: skip
    """Write the tokens of one row after the other, by blocks of slots in a TPU's lanes."""
    R, (K, S, F), T = math.prod(start.shape), slots.shape[-3:], tokens.shape[-2]
    rows = slots.reshape(*slots.shape[: len(layer)], R, K, S, F)
    tokens, start, count = tokens.reshape(R, K, T, F), start.reshape(R), count.reshape(R)
    size = (*(1 for _ in layer), 1, K, _LANES, F)
    turns = 1 + -(-(T - 1) // _LANES)
    start = start % S if wraps else start
    at = positions_from(start, T)
    at = jnp.where(at < (start + count)[:, None], at % S if wraps else at, -1)

    def write_block(i: jax.Array, rows: jax.Array) -> jax.Array:
        row, zero = i // turns, jnp.zeros_like(i)
        # libtpu must see that this is a multiple: elsewhere it would copy all slots of 8 bits.
        first = (start[row] // _LANES + i % turns) % (S // _LANES) * _LANES
        place = (*layer, row, zero, first, zero)
        block = lax.dynamic_slice(rows, place, size)
        slot = first + jnp.arange(_LANES, dtype=jnp.int32)[:, None]
        for t in range(T):
            block = jnp.where(slot == at[row, t], tokens[row, :, t : t + 1], block)
        return lax.dynamic_update_slice(rows, block, place)

    # A loop has a dozen small kernels a turn, and around it a TPU7x copies all slots.
    unroll = not symbols.is_symbolic(R) and turns * R * T <= _UNROLLED
    written = lax.fori_loop(0, turns * R, write_block, rows, unroll=unroll)
    return written.reshape(slots.shape)


def _write_many(
    wraps: bool, slots: jax.Array, tokens: jax.Array, start: jax.Array, count: jax.Array
) -> jax.Array:
    """Write tokens [K, T, F] of one row into its slots [K, S, F], through a window of them.

    The window has the T slots from `start` on, or all slots if they are fewer or wrap around.
    """
    S, T = slots.shape[1], tokens.shape[1]
    size = S if wraps or not symbols.at_most(T, S) else T
    first = jnp.clip(start, 0, S - size)
    # The index of the newest token for each slot of the window.
    t = jnp.arange(size, dtype=jnp.int32) + first - start
    if wraps:
        t = count - 1 - (count - 1 - t) % S
    is_written = ((t >= 0) & (t < count))[None, :, None]
    tokens = jnp.take(tokens, jnp.clip(t, 0, T - 1), axis=1)
    window = lax.dynamic_slice_in_dim(slots, first, size, axis=1)
    window = jnp.where(is_written, tokens, window)
    return lax.dynamic_update_slice_in_dim(slots, window, first, axis=1)
