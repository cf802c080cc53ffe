"""Attention of few queries to many keys, as in decoding.

The queries of a key/value head are rows of one matmul with its keys, heads first. This is the
layout of a `KVCache`, whose keys are read once, without a copy. If the mask leaves few blocks of
keys, they are visited one by one, so that empty slots cost nothing (on GPUs from 1 GiB of keys and
values on). Otherwise one matmul covers all keys. Stored keys and values are converted on the way;
8-bit ones are scaled through the scores and weights. On GPUs, matmuls of few rows with a layer's
part of a stacked cache are sums of products (`_FEW_ROWS`).

In half precision, except on CPUs, exponentials are rounded before their matmul with the values.
Gradients are computed by `reference`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from flax_mha.base import loops, numerics, shapes, symbols
from flax_mha.base.coordinates import At, map_score_arrays
from flax_mha.kernels.call import limits, stored
from flax_mha.kernels.call.spec import (
    AttentionSpec,
    Lowered,
    Result,
    Sums,
    Unsupported,
    name_result,
)
from flax_mha.kernels.call.stored import Stored, cast, dequantize, is_part, map_part, read
from flax_mha.kernels.xla import reference, softmax
from flax_mha.kernels.xla.softmax import finfo_min
from flax_mha.kernels.xla.tile_plan import Plan, tile_states
from flax_mha.kernels.xla.tiles import empty_result
from flax_mha.masks import EMPTY
from flax_mha.scores import Vectors
from flax_mha.sharding.shard_map import vary

# The keys of a block. Visiting a block by itself copies it.
_BLOCK = {"cpu": 32}
_BLOCK_ELSEWHERE = 1024
# From so many rows on, a TPU's program would write float32 scores of all keys, more than it reads
# of keys: blocks of keys are visited one by one.
_MANY_ROWS = {"tpu": 32}
# Up to this share of the blocks, visiting them one by one is faster than reading all keys.
# Measured on two CPU cores at 2,048 keys.
_FEW = 0.2
# For a matmul, XLA:GPU first copies a layer's part of a cache. For sums of products of so few rows,
# it reads the part where it is, once or twice.
_FEW_ROWS = {"gpu": 4}
# On a GPU, a branch takes 60 to 100 µs, in which an H100 reads 200 to 300 MiB. Fewer bytes of keys
# and values than these are read at once.
_LEAST_BYTES = {"gpu": 2**30}

Keyed = jax.Array | Stored


def lower(q: jax.Array, k: Keyed, v: Keyed, spec: AttentionSpec) -> Lowered:
    """Prepare the call, if it has at most `stored.QUERIES` queries."""
    limits.check(spec, q, k, vectors=True, symbolic=True)
    if not symbols.at_most(q.shape[-3], stored.QUERIES):
        raise Unsupported(f"it is for at most {stored.QUERIES} queries, got {q.shape[-3]}")
    q, k, spec = spec.turned(q, k)
    return Lowered(functools.partial(attend, q, k, v, spec))


def attend(q: jax.Array, k: Keyed, v: Keyed, spec: AttentionSpec) -> Result:
    """Compute attention. Keys and values may be `Stored`. Supports only reverse mode."""
    if 0 in q.shape or k.shape[-3] == 0:
        return empty_result(shapes.Dims.of(q, k, v), q.dtype, spec.sinks)
    return name_result(*_core(q, k, v, spec))


@jax.custom_vjp
def _core(q: jax.Array, k: Keyed, v: Keyed, spec: AttentionSpec) -> Result:
    dims = shapes.Dims.of(q, k, v)
    swap = functools.partial(jnp.swapaxes, axis1=-3, axis2=-2)
    q_heads, *kv = jax.tree.map(functools.partial(map_part, swap), (q, k, v), is_leaf=is_part)
    # The queries of a key/value head are rows of one matmul.
    args = q_heads.reshape(*dims.B, dims.K, dims.G * dims.T, dims.H), *kv, spec
    result = _run(dims, *args)
    return jnp.swapaxes(result[0], -3, -2).astype(q.dtype), result[1]


def _forward(*args: Any) -> tuple[Result, Any]:
    result = _core(*args)
    return result, (args, result[1].total)


def _backward(residuals: Any, cotangents: Result) -> Any:
    args, total = residuals

    def recompute(q: jax.Array, k: Keyed, v: Keyed, spec: AttentionSpec) -> Any:
        out, (top, total) = reference.attend(q, dequantize(k), dequantize(v), spec)
        # An lse, 0 without keys: `jax_debug_infs` would report −∞.
        has_keys = total > 0
        return out, jnp.where(has_keys, top + jnp.log(jnp.where(has_keys, total, 1.0)), 0.0)

    # The recomputed maximum may differ in its last digits, so the cotangent is that of the lse.
    return jax.vjp(recompute, *args)[1]((cotangents[0], cotangents[1].total * total))


_core.defvjp(_forward, _backward)


def _run(dims: shapes.Dims, q: jax.Array, k: Keyed, v: Keyed, spec: AttentionSpec) -> Result:
    """Return out [*B, N, T, Hv] and sums [*B, N, T], in at least float32.

    q is [*B, K, G·T, H], k and v are [*B, K, S, ·].
    """
    acc, platform = shapes.wide(q.dtype), spec.platform.name
    if platform == "cpu":
        q = q.astype(acc)
    q = reference.pad_rows(q, spec)
    is_of_layer = is_part(k.values if isinstance(k, Stored) else k)
    few_rows = symbols.at_most(dims.G * dims.T, _FEW_ROWS.get(platform, 0))
    dot = _sum_by_row if is_of_layer and few_rows else _multiply
    visit = functools.partial(_visit, dims, dot, q, k, v, spec)
    total = jnp.zeros((*dims.B, dims.N, dims.T, 1), acc)
    top = softmax.begin(total)
    if spec.sinks is not None:
        sinks = shapes.lead(spec.sinks.astype(acc)[:, None, None], total.ndim)
        top, total = total + sinks, total + 1
    out = jnp.zeros((*dims.B, dims.N, dims.T, dims.Hv), acc)
    carry = jax.tree.map(lambda x: vary(x, (q, k, v, spec)), (top, total, out))

    size = _BLOCK.get(platform, _BLOCK_ELSEWHERE)
    size = dims.S if symbols.at_most(dims.S, size) or symbols.is_symbolic(dims.S) else size
    blocks = -(-dims.S // size)
    # For one matmul, XLA:CPU converts all keys in memory first.
    is_narrow = platform == "cpu" and isinstance(k, Stored) and k.values.dtype != q.dtype
    many = _MANY_ROWS.get(platform)
    is_large = many is not None and not symbols.at_most(dims.G * dims.T, many - 1)
    few = blocks if is_narrow or is_large else int(blocks * _FEW)
    is_small = _bytes(k) + _bytes(v) < _LEAST_BYTES.get(platform, 0)
    # Around a loop, a TPU7x copies all keys and values in 16 bits whose slots are in its lanes.
    is_copied = spec.platform.device == "TPU7x" and (dims.H % 128 != 0 or dims.Hv % 128 != 0)
    if few < blocks and (is_small or (is_copied and _dtype(k).itemsize == 2)):
        few = 0

    def at_once() -> tuple[jax.Array, ...]:
        return visit(dims.S, jnp.int32(0), carry)

    if spec.mask is None or few == 0:
        top, total, out = at_once()
    else:
        is_visited = jnp.asarray(tile_states(spec, spec.at(dims), Plan(dims, dims.T, size))) > EMPTY
        is_visited = is_visited.any((0, 1, 2))
        order, count = jnp.argsort(~is_visited, stable=True), is_visited.sum()

        def by_blocks() -> tuple[jax.Array, ...]:
            return loops.repeat(0, count, lambda i, c: visit(size, order[i], c), carry)

        top, total, out = (
            by_blocks() if few >= blocks else loops.cond(count <= few, by_blocks, at_once)
        )
    return spec.scale_kept(out) / softmax.divisor(total), Sums(top[..., 0], total[..., 0])


def _visit(
    dims: shapes.Dims, dot: Callable[..., jax.Array], q: jax.Array, k: Keyed, v: Keyed,
    spec: AttentionSpec, size: int, index: jax.Array, carry: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Update the carry (maximum score, sum of exponentials, output) with a block of keys."""
    first = index.astype(jnp.int32) * size
    start = jnp.minimum(first, dims.S - size)
    if _dtype(k).itemsize == 1 and dims.S % size == 0:
        # libtpu must see that this is a multiple: elsewhere it would copy all slots of 8 bits.
        start = first

    def cut(x: Any, axis: int) -> jax.Array:
        if size == dims.S or x.shape[axis] == 1:
            return jnp.asarray(x)
        return lax.dynamic_slice_in_dim(x, start, size, axis)

    # Here, so that the copy of a layer's part is part of the matmuls, also in a branch.
    k, v = jax.tree.map(lambda x: cut(read(x), -2), (k, v), is_leaf=is_part)
    at = At(*(cut(x, -1) for x in spec.at(dims)))
    spec = map_score_arrays(lambda x: cut(x, -1), spec)
    top, total, out = carry
    rows = dims.G * dims.T
    vectors = _vectors(dims, q[..., :rows, :], k, spec, total.dtype) if spec.vectors else None
    # In float16, a weight times a scale could overflow or underflow. bfloat16 rounds it by at most
    # 2⁻⁹, less than the error of the stored value.
    is_scaled = isinstance(v, Stored) and v.scale is not None
    v_dtype = jnp.dtype(jnp.bfloat16) if is_scaled and q.dtype == jnp.float16 else q.dtype
    (k, k_scale), (v, v_scale) = _split_scale(k, q.dtype), _split_scale(v, v_dtype)
    by_head = (*dims.B, dims.K, rows)
    dot = functools.partial(dot, dtype=total.dtype, precision=spec.precision)
    s = dot(q, k, over_keys=False)[..., :rows, :] * jnp.asarray(spec.scale, total.dtype)
    s = (s * k_scale).reshape(*dims.logits[:-1], size)
    s, allowed = spec.apply(s, at, finfo_min(total.dtype), vectors)
    if dims.S % size != 0:
        # The last block starts early enough to be full, so it repeats some keys.
        is_new = shapes.lead(start + jnp.arange(size, dtype=jnp.int32) >= first, s.ndim)
        allowed = is_new if allowed is None else allowed & is_new
        s = jnp.where(is_new, s, finfo_min(total.dtype))
    top, total, p, old = softmax.step(top, total, s, allowed)
    p = spec.apply_dropout(p, at).reshape(*by_head, size) * v_scale
    p = reference.pad_rows(p.astype(v.dtype), spec)
    more = dot(p, v, over_keys=True)[..., :rows, :]
    return top, total, out * old + more.reshape(out.shape)


def _multiply(
    x: jax.Array, y: jax.Array, over_keys: bool, dtype: jnp.dtype, precision: Any
) -> jax.Array:
    """Return rows [..., R, ·] times keys or values [..., S, ·], summed over keys or features."""
    sums = "...ts,...sh->...th" if over_keys else "...th,...sh->...ts"
    return numerics.einsum(sums, x, y, precision=precision, preferred_element_type=dtype)


def _sum_by_row(
    x: jax.Array, y: jax.Array, over_keys: bool, dtype: jnp.dtype, precision: Any
) -> jax.Array:
    """Return the result of `_multiply`, by a sum for each row.

    XLA:GPU fuses the sums of several rows, and reads y where it is.
    """
    x, y, axis = x.astype(dtype), y.astype(dtype), -1 if over_keys else -2
    rows = [jnp.expand_dims(x[..., i, :], axis) * y for i in range(x.shape[-2])]
    # Without a barrier, XLA computes the sums again in the operations that read them.
    return jnp.stack(lax.optimization_barrier([row.sum(-3 - axis) for row in rows]), -2)


def _bytes(x: Keyed) -> Any:
    """Return the number of bytes of keys or values; of a symbol's, infinity."""
    count = math.prod(x.shape)
    return math.inf if symbols.is_symbolic(count) else count * _dtype(x).itemsize


def _dtype(x: Keyed) -> Any:
    """Return the dtype in memory of keys or values."""
    return x.values.dtype if isinstance(x, Stored) else x.dtype


def _vectors(
    dims: shapes.Dims, q: jax.Array, k: Keyed, spec: AttentionSpec, dtype: jnp.dtype
) -> Vectors:
    """Return queries and keys [*B, N, ·, H] in the form that score functions read."""
    q = q.reshape(*dims.B, dims.N, dims.T, dims.H).astype(dtype)
    if isinstance(k, Stored) and k.scale is not None:
        k = k.values.astype(dtype) * k.scale.astype(dtype)
    k = dequantize(k).astype(dtype)
    return q * jnp.asarray(spec.scale, dtype), jnp.repeat(k, dims.G, -3)


def _split_scale(x: Keyed, dtype: jnp.dtype) -> tuple[jax.Array, Any]:
    """Return values [*B, K, S, H] in a dtype, and their scale [*B, K, 1, S], or 1."""
    values, scale = (x.values, x.scale) if isinstance(x, Stored) else (x, None)
    return cast(values, dtype), 1.0 if scale is None else jnp.swapaxes(scale, -1, -2)
