"""The online softmax of a tile of scores, forward and backward, for all kernels.

Each query keeps two numbers while its scores come tile by tile: the maximum `top`, and the sum
`total` of exponentials of scores minus top. For each tile

    top′ = max(top, s);   total′ = total·exp(top − top′) + Σ exp(s − top′)
    out′ = out·exp(top − top′) + exp(s − top′)·v

and at the end out/total, lse = top + log(total). The backward pass needs one tile at a time: with
p = exp(s − top)/total and dp = dout·vᵀ,

    δ = Σ dout·out − dlse;   ds = p·(dp − δ)

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao,
"FlashAttention-2", 2023, for the gradient.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from flax_mha.base import shapes
from flax_mha.base.loops import select
from flax_mha.kernels.call.spec import Result, Sums


def unread(shape: Sequence[int], out: jax.Array) -> jax.Array:
    """Return float32 zeros in place of sums that nothing reads, with the mapped axes of the output.

    The rule of a derivative computes the sums. Under `vmap`, JAX expects that they are mapped where
    these are.
    """
    first = out[(0,) * out.ndim].astype(jnp.float32)
    return jnp.broadcast_to(jnp.where(False, first, 0.0), shape)


def finfo_min(dtype: jnp.dtype) -> float:
    """Return the minimum of a dtype, the initial maximum of scores.

    Unlike −∞, it can be subtracted from itself, and `jax_debug_infs` does not report it.
    """
    return float(jnp.finfo(dtype).min)


# The precision of sums over a query's features in gradients. They are cheap, and must be as exact
# as the matmuls at any precision of the call.
_EXACT = lax.Precision.HIGHEST


def begin(total: jax.Array) -> jax.Array:
    """Return the initial maximum: finite, so that it can be subtracted."""
    return lax.add(total, total.dtype.type(finfo_min(total.dtype)))


def _is_zero(x: jax.Array) -> jax.Array:
    # A constant of the same dtype: under `jax_enable_x64`, a Python float is float64.
    return lax.eq(x, x.dtype.type(0))


def step(
    top: jax.Array, total: jax.Array | None, s: jax.Array, allowed: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    """Update the softmax of queries [..., 1] with a tile of scores s [..., n].

    `top` and `total` are the maximum and the sum of exponentials so far; `total` is None for the
    first tile. Masked scores are −∞, or finfo.min if the mask is given as `allowed`. Returns the
    new top and total, the exponentials of s, and the factor of earlier sums or None.
    """
    # The weights do not depend on the shift, so it needs no derivative.
    last = s.ndim - 1
    tile_max = lax.expand_dims(lax.reduce_max(s, (last,)), (last,))
    new = lax.stop_gradient(lax.max(top, tile_max))
    p = lax.exp(lax.sub(s, new))
    p = p if allowed is None else select(allowed, p, 0.0)
    tile_sum = lax.expand_dims(lax.reduce_sum(p, (last,)), (last,))
    if total is None:
        return new, tile_sum, p, None
    rescale = lax.exp(lax.sub(top, new))
    return new, lax.add(lax.mul(total, rescale), tile_sum), p, rescale


def divisor(total: jax.Array) -> jax.Array:
    """Return the divisor of out: the sum of exponentials, or 1 for fully masked queries."""
    return select(_is_zero(total), 1.0, total)


def merge(one: Result, other: Result) -> Result:
    """Merge attention to two sets of keys, in the dtype of the first."""
    top = lax.stop_gradient(jnp.maximum(one[1].top, other[1].top))
    parts = [(x, sums.total * jnp.exp(sums.top - top)) for x, sums in (one, other)]
    total = parts[0][1] + parts[1][1]
    first, second = (
        x.astype(total.dtype) * shapes.by_query(part / divisor(total)) for x, part in parts
    )
    return (first + second).astype(one[0].dtype), Sums(top, total)


def merge_sinks(result: Result, sinks: jax.Array) -> Result:
    """Merge attention with sinks [N], scores without values."""
    empty = jax.tree.map(jnp.zeros_like, result)
    top = shapes.lead(sinks.astype(empty[1].top.dtype)[:, None], empty[1].top.ndim)
    sink = empty[0], Sums(empty[1].top + top, jnp.ones_like(empty[1].total))
    out, sums = merge(result, sink)
    return zero_empty(result[1], out), sums


def zero_empty(sums: Sums, x: jax.Array) -> jax.Array:
    """Set x [*B, T, N, ·] to 0 for fully masked queries, because 0·NaN is NaN."""
    return jnp.where(shapes.by_query(sums.total) == 0, 0.0, x)


@jax.custom_vjp
def part_of_result(part: Result, result: Result) -> Result:
    """Return `result`, the merge of several parts, with the gradients of one part."""
    del part
    return result


def _part_backward(residuals: tuple[Result, Result], cotangents: Result) -> tuple[Result, None]:
    (out, sums), (whole_out, whole) = residuals
    dout, (_, dtotal) = cotangents
    # The weight of all keys of the part is share·total.
    share, wide = jnp.exp(sums.top - whole.top) / divisor(whole.total), whole.total.dtype
    change = out.astype(wide) - whole_out.astype(wide)
    gain = jnp.einsum("...tnh,...tnh->...nt", dout.astype(wide), change, precision=_EXACT)
    dsums = Sums(jnp.zeros_like(share), share * (dtotal * whole.total + gain))
    dout = dout.astype(wide) * shapes.by_query(share * sums.total)
    return (dout.astype(out.dtype), dsums), None


part_of_result.defvjp(lambda part, result: (result, (part, result)), _part_backward)


def gradient_inputs(
    out: jax.Array, has_keys: jax.Array, top: jax.Array, total: jax.Array, dout: jax.Array,
    dsums: Sums, axis: int = -1,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Return what gradients take of each query: dout, top, 1/total and δ.

    out and its cotangent dout have the features in an axis, −1 or −2, that the others lack. Fully
    masked queries have no `has_keys`, and a dout of 0. `top` and `total` include the sinks, and
    `dsums` are their cotangents. A maximum needs none, because it shifts all scores.
    """
    # Zero the cotangents of fully masked queries: their weights are 0, and 0·NaN is NaN.
    dout = jnp.where(jnp.expand_dims(has_keys, axis), dout, 0.0)
    dtotal = jnp.where(total == 0, 0.0, dsums.total)
    if axis == -1:
        # An einsum, because XLA:CPU takes ten times as long for the sum of a product of rank 5.
        delta = jnp.einsum(
            "...h,...h->...", dout, out, precision=_EXACT, preferred_element_type=total.dtype
        )
    else:
        # On TPUs XLA fuses this sum, but not the einsum.
        delta = jnp.sum(dout.astype(total.dtype) * out.astype(total.dtype), axis)
    return dout, top, 1 / divisor(total), delta - dtotal * total


def gradient(p: jax.Array, dp: jax.Array, delta: jax.Array, masked: bool = True) -> jax.Array:
    """Return the gradient of a tile of scores: 0 where masked, because dp may be infinite there."""
    change = lax.sub(dp, delta)
    return lax.mul(p, select(_is_zero(p), 0.0, change) if masked else change)


def sink_gradient(
    sinks: jax.Array, top: jax.Array, share: jax.Array, delta: jax.Array
) -> jax.Array:
    """Return the gradient of each query's sink, which has no value: p·(0 − δ)."""
    return -jnp.exp(sinks - top) * share * delta
