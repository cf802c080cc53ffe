"""Sampling of the next token: functions of logits."""

from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct

from flax_mha import sharding
from flax_mha.base import checks


def top_k(logits: jax.Array, k: int) -> jax.Array:
    """Keep the k most likely tokens, and set the logits of all others to −∞.

    Args:
      logits: [*B, V].
      k: the number of tokens, 1 … V. Among equal logits, smaller token ids come first.
    """
    _check_logits(logits)
    checks.positive(top_k=k)
    if k > logits.shape[-1]:
        raise ValueError(
            f"top_k must be at most the {logits.shape[-1]} tokens of the vocabulary, got {k}; "
            f"None keeps all"
        )
    return jnp.where(_ranks(logits) < k, logits, -jnp.inf)


def top_p(logits: jax.Array, p: jax.Array | float) -> jax.Array:
    """Keep the fewest tokens with a total probability of p, and set all other logits to −∞.

    Args:
      logits: [*B, V].
      p: the probability, in (0, 1]. At least one token is kept.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020.
    """
    _check_logits(logits)
    if hasattr(p, "dtype"):
        shape = checks.floating("top_p", p).shape
        if shape:
            raise ValueError(f"top_p must be one number, got shape {shape}; vmap for several")
        p = jnp.asarray(p, logits.dtype)
    elif not 0 < checks.number("top_p", p) <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {p}; 1 keeps all tokens")
    order = jnp.argsort(logits, axis=-1, descending=True)
    likely = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, axis=-1)
    before = jnp.cumsum(likely, axis=-1) - likely
    first = jax.lax.broadcasted_iota(jnp.int32, before.shape, before.ndim - 1) == 0
    kept = (before < p) | first
    return jnp.where(jnp.take_along_axis(kept, _ranks(logits), axis=-1), logits, -jnp.inf)


def _check_logits(logits: jax.Array) -> None:
    checks.floating("logits", logits)
    if not logits.ndim or not logits.shape[-1]:
        raise ValueError(f"logits must have shape [*B, V], got {logits.shape}; add the axis V")


def _ranks(logits: jax.Array) -> jax.Array:
    """Return the rank of each token: 0 for the most likely one, 1 for the next, …"""
    order = jnp.argsort(logits, axis=-1, descending=True)
    return jnp.argsort(order, axis=-1)


class Sampling(struct.PyTreeNode):
    """A sampling rule: divide logits by the temperature, keep top_k, then top_p, and draw.

    Attributes:
      temperature: the divisor of logits; None for the most likely token (greedy).
      top_k: the number of tokens to keep; None for all.
      top_p: the probability to keep; None for all tokens.
    """

    temperature: Any = None
    top_k: int | None = struct.field(pytree_node=False, default=None)
    top_p: Any = None

    @classmethod
    def checked(cls, temperature: float, top_k: int | None, top_p: float | None) -> Self:
        """Check a user's numbers, and return their rule.

        Args:
          temperature: the divisor of logits; 0 for greedy choice.
          top_k: the number of tokens to keep.
          top_p: the probability to keep.
        """
        if checks.number("temperature", temperature) < 0:
            raise ValueError(
                f"temperature must be at least 0 and finite, got {temperature}; 0 is greedy"
            )
        if top_p is not None and not 0 < checks.number("top_p", top_p) <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {top_p}; None keeps all tokens")
        checks.optional(top_k=top_k)
        if not temperature and (top_k, top_p) != (None, None):
            raise ValueError(
                f"top_k and top_p must be None with temperature=0, which takes the most likely "
                f"token, got {top_k} and {top_p}; set a temperature, or drop them"
            )
        scalar = None if top_p is None else jnp.float32(top_p)
        return cls(jnp.float32(temperature) if temperature else None, top_k, scalar)

    def choose(self, key: jax.Array | None, logits: jax.Array) -> jax.Array:
        """Draw tokens int32 [B] from logits [B, V].

        Args:
          key: the random key; a row's draw depends only on it and on the row's index.
          logits: [B, V].
        """
        if self.temperature is None or key is None:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)

        def limit(logits: jax.Array, rule: Self) -> jax.Array:
            logits = logits / rule.temperature
            logits = logits if rule.top_k is None else top_k(logits, rule.top_k)
            return logits if rule.top_p is None else top_p(logits, rule.top_p)

        limited = sharding.auto(limit, ("batch", None), logits, self)
        # The argmax of logits with Gumbel noise is a sample of their softmax.
        noise = jax.random.gumbel(key, limited.shape, limited.dtype)
        return jnp.argmax(limited + sharding.like(noise, limited), axis=-1).astype(jnp.int32)
