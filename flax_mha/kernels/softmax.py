"""The algebra of a tile of scores, once for all kernels: forward, merged, and backward.

Scores come tile by tile, and each query has a row of them, of which two numbers are kept: the
greatest so far, and the sum of the exponentials of the distances to it. For each tile

    top′ = max(top, s);   total′ = total·exp(top − top′) + Σ exp(s − top′)
    out′ = out·exp(top − top′) + exp(s − top′)·v

and in the end out/total, lse = top + log(total). Backward, with p = exp(s − top)/total of any tile
alone and dp = dout·vᵀ,

    δ = Σ dout·out − dlse;   ds = p·(dp − δ)

Kernels are schedules over this: which tiles, where they are kept, in which order.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao,
"FlashAttention-2", 2023, for the gradient.
"""

import jax
import jax.numpy as jnp
from jax import lax

from flax_mha.base import shapes
from flax_mha.kernels.loops import select
from flax_mha.kernels.spec import Result


@jax.custom_jvp
def finite(x: jax.Array) -> jax.Array:
    """Gives x with 0 where it is not finite, and its derivative as if it were x.

    Where a mask forbids what is not finite the derivative is 0 already, elsewhere it is NaN.
    """
    return lax.select(lax.is_finite(x), x, lax.full_like(x, 0))


@finite.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return finite(*primals), *tangents


def nan_flag(x: jax.Array) -> jax.Array:
    """0 for each vector of x [..., F] that is finite, NaN for the others, [...]."""
    zeros = lax.mul(lax.stop_gradient(x), lax.full_like(x, 0))
    # A product, for XLA:CPU is far slower at sums, and at `all`, over a short last axis.
    ones = lax.full((x.shape[-1],), 1, x.dtype)
    return lax.dot_general(zeros, ones, (((x.ndim - 1,), (0,)), ((), ())))


def move_nan_to_keys(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Moves the NaN of a value to its key, from where it spreads if the mask allows.

    In the values themselves it would meet weights of 0.
    """
    return lax.add(k, lax.expand_dims(nan_flag(v), (v.ndim - 1,))), finite(v)


def finfo_min(dtype: jnp.dtype) -> float:
    """The least number of a dtype: a bound of scores to begin a maximum with.

    Other than −∞ it can be subtracted from itself, and is no fault where JAX looks for infinities
    (`jax_debug_infs`).
    """
    return float(jnp.finfo(dtype).min)


# Of the sums over one query's features that gradients subtract. They cost little, and must not be
# less exact than the products, whatever precision the call asks for.
_EXACT = lax.Precision.HIGHEST


def begin(total: jax.Array) -> jax.Array:
    """The greatest score where nothing has been seen: finite, so that it can be subtracted."""
    return lax.add(total, finfo_min(total.dtype))


def step(
    top: jax.Array, total: jax.Array, s: jax.Array, allowed: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Adds a tile of scores to rows [..., 1].

    Args:
      top: the greatest score so far.
      total: the sum of exponentials.
      s: scores [..., n], −∞ where masked; or the least number there, and
      allowed: where they are not.

    Returns:
      top and total, the exponentials of s, and what those before are to be multiplied by.
    """
    # Any shift gives the same weights, so its derivatives are left out.
    last = s.ndim - 1
    greatest = lax.expand_dims(lax.reduce_max(s, (last,)), (last,))
    new = lax.stop_gradient(lax.max(top, greatest))
    p, old = lax.exp(lax.sub(s, new)), lax.exp(lax.sub(top, new))
    p = p if allowed is None else select(allowed, p, 0.0)
    more = lax.expand_dims(lax.reduce_sum(p, (last,)), (last,))
    return new, lax.add(lax.mul(total, old), more), p, old


def sunk(sink: jax.Array, top: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The greatest score and the sum of exponentials with one more, that gives nothing: a sink."""
    new = jnp.maximum(top, sink)
    return new, total * jnp.exp(top - new) + jnp.exp(sink - new)


def divisor(total: jax.Array) -> jax.Array:
    """Return the divisor of out: the sum of the exponentials, 1 where nothing is seen."""
    return select(lax.eq(total, 0.0), 1.0, total)


def finish(top: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the divisor of out, and the lse: the least number where no key is seen.

    That is not −∞, which `jax_debug_infs` would find in rows that only fill a block.
    """
    whole = divisor(total)
    return whole, select(lax.eq(total, 0.0), finfo_min(top.dtype), lax.add(top, lax.log(whole)))


def minus_infinity(lse: jax.Array) -> jax.Array:
    """The lse as users know it: −∞ where nothing is seen."""
    return jnp.where(lse == finfo_min(lse.dtype), -jnp.inf, lse)


def of_lse(lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A greatest score and a sum of exponentials that have this lse, to go on from."""
    seen = lse != -jnp.inf
    return jnp.where(seen, lse, finfo_min(lse.dtype)), seen.astype(lse.dtype)


def merge(one: Result, other: Result) -> Result:
    """Attention to two sets of keys at once, from out and lse of each."""
    lse = jnp.logaddexp(one[1], other[1])
    first, second = (
        x.astype(lse.dtype) * shapes.by_query(share(part, lse)) for x, part in (one, other)
    )
    return first + second, lse


def share(part: jax.Array, lse: jax.Array) -> jax.Array:
    """The weight of some keys among all; 0 where nothing is seen."""
    return jnp.exp(part - jnp.where(lse == -jnp.inf, 0.0, lse))


@jax.custom_vjp
def of_part(part: Result, whole: Result) -> Result:
    """The whole, Σ share·part over parts, whose gradients are those of this part alone."""
    del part
    return whole


def _of_part_backward(parts: tuple[Result, Result], cotangents: Result) -> tuple[Result, None]:
    (out, lse), whole = parts
    dout, dlse = cotangents
    weight, wide = share(lse, whole[1]), lse.dtype
    change = out.astype(wide) - whole[0].astype(wide)
    gain = jnp.einsum("...tnh,...tnh->...nt", dout.astype(wide), change, precision=_EXACT)
    dout = dout.astype(wide) * shapes.by_query(weight)
    return (dout.astype(out.dtype), weight * (dlse + gain)), None


of_part.defvjp(lambda part, whole: (whole, (part, whole)), _of_part_backward)


def of_rows(
    out: jax.Array, seen: jax.Array, top: jax.Array, total: jax.Array, dout: jax.Array,
    dlse: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Compute the arguments of `gradient` that belong to queries.

    Args:
      out: [..., Hv].
      seen: whether a key is seen, [...].
      top: the greatest score, of sinks too, [...].
      total: the sum of the exponentials of the distances to it.
      dout: the cotangent of out.
      dlse: that of the lse.

    Returns:
      dout, 0 where no key is seen; 1/total; and δ.
    """
    # What is asked of such a row, NaN included, must not meet its weights of 0.
    dout = jnp.where(seen[..., None], dout, 0.0)
    dlse = jnp.where(total == 0, 0.0, dlse)
    # (As an einsum, for XLA:CPU takes ten times as long for the sum of a product of rank 5.)
    delta = jnp.einsum(
        "...h,...h->...", dout, out, precision=_EXACT, preferred_element_type=total.dtype
    )
    delta = delta - dlse
    return dout, 1 / jnp.where(total == 0, 1.0, total), delta


def weights(s: jax.Array, top: jax.Array, share: jax.Array, guarded: bool = False) -> jax.Array:
    """The weights of a tile of scores; guarded, 0 where masked though the row's top is NaN.

    Not exp(s − lse), which would lose the last digits of large scores.
    """
    p = lax.mul(lax.exp(lax.sub(s, top)), share)
    # Where it is not needed it is left out: it costs XLA:CPU time in every tile.
    return select(s == -jnp.inf, 0.0, p) if guarded else p


def gradient(p: jax.Array, dp: jax.Array, delta: jax.Array, masked: bool = True) -> jax.Array:
    """The gradient of a tile of scores: 0 where masked, for dp may be infinite there."""
    ds = lax.mul(p, lax.sub(dp, delta))
    return select(lax.eq(p, 0.0), 0.0, ds) if masked else ds


def sink_gradient(
    sinks: jax.Array, top: jax.Array, share: jax.Array, delta: jax.Array
) -> jax.Array:
    """Return the gradient of each row's sink, whose weight gives nothing: p·(0 − δ)."""
    return -jnp.exp(sinks - top) * share * delta
