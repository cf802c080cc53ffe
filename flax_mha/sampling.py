"""Sampling of the next token: functions of logits."""

import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from flax_mha import sharding
from flax_mha.base import checks, shapes

__all__ = ["Sampling", "min_p", "top_k", "top_p"]
__dir__ = __all__.copy


def top_k(logits: jax.Array, k: int) -> jax.Array:
    """Keep the k most likely tokens, and set the logits of all others to −∞.

    Args:
      logits: [*B, V].
      k: the number of tokens; V or more keeps all. Among equal logits, smaller token ids come
        first.
    """
    checks.positive(top_k=k)
    *_, V = checks.array("logits", logits).shape
    k = min(k, V)
    # XLA:CPU selects a few float32 numbers quickly. Other platforms may sort all of them.
    if k <= 1024 and sharding.platform() == "cpu" and shapes.wide(logits.dtype) == jnp.float32:
        return _limit(_is_selected, logits, k)
    return _limit(_is_counted, logits, k)


def top_p(logits: jax.Array, p: jax.Array | float) -> jax.Array:
    """Keep the fewest tokens with a total probability of p, and set all other logits to −∞.

    Args:
      logits: [*B, V].
      p: the probability, in (0, 1]. At least one token is kept.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020.
    """
    p = _share("top_p", p, checks.array("logits", logits).dtype)
    return _limit(_is_likely, logits, p)


def min_p(logits: jax.Array, p: jax.Array | float) -> jax.Array:
    """Keep tokens of at least p times the highest probability, and set all other logits to −∞.

    Args:
      logits: [*B, V].
      p: the share of the highest probability, in (0, 1].

    Source: Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2024.
    """
    p = _share("min_p", p, checks.array("logits", logits).dtype)
    x = logits.astype(p.dtype)
    return jnp.where(x >= x.max(-1, keepdims=True) + jnp.log(p), logits, -jnp.inf)


def _limit(is_kept: Callable[..., jax.Array], logits: jax.Array, most: Any) -> jax.Array:
    """Set the logits of tokens that are not in is_kept(logits, most) to −∞."""

    def limit(logits: jax.Array, most: Any) -> jax.Array:
        # If devices shared the tokens, each step of a search would wait for a sum of all devices.
        whole = sharding.constrain(logits, (None,))
        # Flattened, because XLA would gather it transposed, and transpose it back in each step.
        flat = whole.reshape(*whole.shape[:-2], -1)
        whole = lax.optimization_barrier(flat).reshape(whole.shape)
        kept = is_kept(whole, most)
        return jnp.where(sharding.constrain(kept, (None,)), logits, -jnp.inf)

    return sharding.auto(limit, (), logits, most)


def _share(name: str, p: Any, dtype: Any) -> jax.Array:
    """Check a share in (0, 1] of probabilities of this dtype, and return it, at least float32."""
    if hasattr(p, "dtype"):
        shape = checks.floating(name, p).shape
        if shape:
            raise ValueError(f"{name} must be one number, got shape {shape}; vmap for several")
    elif not 0 < checks.number(name, p) <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {p}; leave it out to keep all tokens")
    return jnp.asarray(p, shapes.wide(dtype))


# Jitted, because outside of jit JAX would compile the loops in each call.
@jax.jit
def _is_counted(logits: jax.Array, k: int) -> jax.Array:
    return _fewest(logits, lambda first: jnp.sum(first, -1, keepdims=True) >= k)


@jax.jit
def _is_likely(logits: jax.Array, p: jax.Array) -> jax.Array:
    x = lax.stop_gradient(logits).astype(p.dtype)
    e = jnp.exp(x - x.max(-1, keepdims=True))
    total = jnp.sum(e, -1, keepdims=True)
    # The smaller side is summed, which loses fewer bits. NaN ends the search at the first token.
    from_first = p < 0.5

    def is_enough(first: jax.Array) -> jax.Array:
        side = jnp.sum(e, -1, keepdims=True, where=first == from_first)
        return ~jnp.where(from_first, side < p * total, side > (1 - p) * total)

    is_first = _indices(x) == jnp.argmax(x, -1, keepdims=True)
    return is_first | _fewest(x, is_enough) | (p >= 1)


@functools.partial(jax.jit, static_argnums=1)
def _is_selected(logits: jax.Array, k: int) -> jax.Array:
    x, _ = _ordered(logits)
    # The barrier keeps JAX 0.10 from a sort of all tokens.
    _, ids = lax.optimization_barrier(lax.top_k(x, k))
    return jnp.put_along_axis(jnp.zeros(x.shape, bool), ids, True, axis=-1, inplace=False)


def _fewest(logits: jax.Array, is_enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return True for the fewest of the most likely tokens [*B, V] that are enough.

    Bisect the bits of the least logit, then the ids of equal ones. A sort would take longer.

    `is_enough` maps such a mask [*B, V] to bool [*B, 1].
    """
    _, ranks = _ordered(logits)
    index = _indices(ranks)
    # On GPUs each step starts several kernels, so it decides four bits.
    width = 4 if sharding.platform() == "gpu" else 1

    def largest(bits: int, start: jax.Array, holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
        steps = -(-bits // width)

        def step(i: jax.Array, x: jax.Array) -> jax.Array:
            unit = jnp.ones_like(x) << (width * (steps - 1 - i)).astype(x.dtype)
            if width == 1:
                return jnp.where(holds(x + unit), x + unit, x)
            digits = jnp.arange(1, 2**width, dtype=x.dtype)
            held = jax.vmap(lambda digit: holds(x + digit * unit))(digits)
            return x + held.sum(0, dtype=x.dtype) * unit

        return lax.fori_loop(0, steps, step, start)

    # The loop's start is made of data, so that it is sharded as the loop's results.
    zero = ranks.max(-1, keepdims=True) * 0
    info = jnp.iinfo(ranks.dtype)
    least = largest(info.bits, zero + info.min, lambda x: is_enough(ranks >= x))
    is_above, is_equal = ranks > least, ranks == least

    def until(last: jax.Array) -> jax.Array:
        return is_above | (is_equal & (index < last))

    bits = logits.shape[-1].bit_length()
    last = largest(bits, zero.astype(index.dtype), lambda x: ~is_enough(until(x)))
    return until(last + 1)


def _ordered(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return logits, float32 or wider, and integers in the same order. NaN is the largest."""
    x = lax.stop_gradient(logits).astype(shapes.wide(logits.dtype))
    # Zeros and NaNs of both signs are equal.
    x = jnp.where(x == 0, 0, jnp.where(jnp.isnan(x), jnp.nan, x))
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))
    return x, jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def _indices(x: jax.Array) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)


class Sampling(struct.PyTreeNode):
    """A sampling rule: divide logits by the temperature, keep top_k, top_p, min_p, and draw.

    Attributes:
      temperature: the divisor of logits; None for the most likely token (greedy).
      top_k: the number of tokens to keep (default: all).
      top_p: the probability to keep (default: 1).
      min_p: the least share of the highest probability (default: 0).
    """

    temperature: Any = None
    top_k: int | None = struct.field(pytree_node=False, default=None)
    top_p: Any = None
    min_p: Any = None

    @classmethod
    def checked(
        cls, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None = None
    ) -> Self:
        """Check a user's numbers, and return their rule. Temperature 0 is greedy."""
        if checks.number("temperature", temperature) < 0:
            raise ValueError(
                f"temperature must be at least 0 and finite, got {temperature}; 0 is greedy"
            )
        shares = {
            name: _share(name, checks.number(name, p), jnp.float32)
            for name, p in (("top_p", top_p), ("min_p", min_p)) if p is not None
        }  # fmt: skip
        checks.optional(top_k=top_k)
        if not temperature and (top_k, top_p, min_p) != (None, None, None):
            raise ValueError(
                f"top_k, top_p and min_p must be None with temperature=0, which takes the most "
                f"likely token, got {top_k}, {top_p} and {min_p}; set a temperature, or drop them"
            )
        return cls(jnp.float32(temperature) if temperature else None, top_k, **shares)

    def choose(self, key: jax.Array | None, logits: jax.Array) -> jax.Array:
        """Draw tokens int32 [B] from logits [B, V].

        A row's draw depends only on the key and on the row's index.
        """
        if self.temperature is None or key is None:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)

        limited = sharding.auto(
            lambda logits, rule: rule.limit(logits), ("batch", None), logits, self
        )
        # The argmax of logits with Gumbel noise is a sample of their softmax. Without mode="high",
        # tokens of probability 1e-7 are hardly ever drawn.
        noise = jax.random.gumbel(key, limited.shape, limited.dtype, mode="high")
        return jnp.argmax(limited + sharding.like(noise, limited), axis=-1).astype(jnp.int32)

    def limit(self, logits: jax.Array) -> jax.Array:
        """Divide logits [*B, V] by the temperature, and set excluded ones to −∞."""
        logits = logits.astype(shapes.wide(logits.dtype))
        logits = logits / jnp.asarray(self.temperature, logits.dtype)
        logits = logits if self.top_k is None else top_k(logits, self.top_k)
        logits = logits if self.top_p is None else top_p(logits, self.top_p)
        return logits if self.min_p is None else min_p(logits, self.min_p)
