"""Sampling of the next token: functions of logits."""

from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct

from flax_mha import sharding
from flax_mha.base import checks, shapes

__all__ = ["Sampling", "min_p", "top_k", "top_p"]
__dir__ = __all__.copy


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
    p = _share("top_p", p, logits.dtype)
    likely = jnp.sort(jax.nn.softmax(logits, axis=-1), axis=-1, descending=True)
    count = jnp.sum(jnp.cumsum(likely, axis=-1) - likely < p, axis=-1, keepdims=True)
    return jnp.where(_ranks(logits) < jnp.maximum(count, 1), logits, -jnp.inf)


def min_p(logits: jax.Array, p: jax.Array | float) -> jax.Array:
    """Keep tokens of at least p times the highest probability, and set all other logits to −∞.

    Args:
      logits: [*B, V].
      p: the share of the highest probability, in (0, 1].

    Source: Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2024.
    """
    _check_logits(logits)
    least = logits.max(-1, keepdims=True) + jnp.log(_share("min_p", p, logits.dtype))
    return jnp.where(logits >= least, logits, -jnp.inf)


def _share(name: str, p: Any, dtype: Any) -> jax.Array:
    """Check a share in (0, 1], and return it as an array of this dtype."""
    if hasattr(p, "dtype"):
        shape = checks.floating(name, p).shape
        if shape:
            raise ValueError(f"{name} must be one number, got shape {shape}; vmap for several")
    elif not 0 < checks.number(name, p) <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {p}; leave it out to keep all tokens")
    return jnp.asarray(p, dtype)


def _check_logits(logits: jax.Array) -> None:
    checks.floating("logits", logits)
    if not logits.ndim or not logits.shape[-1]:
        raise ValueError(f"logits must have shape [*B, V], got {logits.shape}; add the axis V")


def _ranks(logits: jax.Array) -> jax.Array:
    """Return the rank of each token: 0 for the most likely one, 1 for the next, …"""
    order = jnp.argsort(logits, axis=-1, descending=True)
    return jnp.argsort(order, axis=-1)


class Sampling(struct.PyTreeNode):
    """A sampling rule: divide logits by the temperature, keep top_k, top_p, min_p, and draw.

    Attributes:
      temperature: the divisor of logits; None for the most likely token (greedy).
      top_k: the number of tokens to keep; None for all.
      top_p: the probability to keep; None for all tokens.
      min_p: the least share of the highest probability; None for all tokens.
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

        Args:
          key: the random key; a row's draw depends only on it and on the row's index.
          logits: [B, V].
        """
        if self.temperature is None or key is None:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)

        limited = sharding.auto(
            lambda logits, rule: rule.limit(logits), ("batch", None), logits, self
        )
        # The argmax of logits with Gumbel noise is a sample of their softmax.
        noise = jax.random.gumbel(key, limited.shape, limited.dtype)
        return jnp.argmax(limited + sharding.like(noise, limited), axis=-1).astype(jnp.int32)

    def limit(self, logits: jax.Array) -> jax.Array:
        """Divide logits [*B, V] by the temperature, and set those of excluded tokens to −∞."""
        if self.temperature is not None:
            logits = logits.astype(shapes.wide(logits.dtype))
            logits = logits / jnp.asarray(self.temperature, logits.dtype)
        logits = logits if self.top_k is None else top_k(logits, self.top_k)
        logits = logits if self.top_p is None else top_p(logits, self.top_p)
        return logits if self.min_p is None else min_p(logits, self.min_p)
