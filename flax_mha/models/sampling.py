"""Which token comes next: rules over logits, as plain functions."""

from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct

from flax_mha import sharding
from flax_mha.base import checks


def top_k(logits: jax.Array, k: int) -> jax.Array:
    """Keep the k most likely tokens, and set the others to −∞.

    Args:
      logits: [*B, V].
      k: 1 … V. Of equal logits those of smaller tokens come first.

    Returns:
      [*B, V].

    Raises:
      ValueError: if k is not in 1 … V.
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
    """Keep the fewest most likely tokens that have probability p together; others become −∞.

    Args:
      logits: [*B, V].
      p: in (0, 1]. At least one token is kept.

    Returns:
      [*B, V].

    Raises:
      ValueError, TypeError: if p is no number, or known to be out of range.

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
    """Return 0 for the most likely token, 1 for the next, …"""
    order = jnp.argsort(logits, axis=-1, descending=True)
    return jnp.argsort(order, axis=-1)


class Sampling(struct.PyTreeNode):
    """How a token is chosen: divide by the temperature, keep top_k, then top_p, and draw.

    Attributes:
      temperature: None for the most likely token (greedy).
      top_k: None for all.
      top_p: None for all.
    """

    temperature: Any = None
    top_k: int | None = struct.field(pytree_node=False, default=None)
    top_p: Any = None

    @classmethod
    def checked(cls, temperature: float, top_k: int | None, top_p: float | None) -> Self:
        """Make the rule of a user's numbers.

        Raises:
          ValueError: if they are out of range, or without effect.
          TypeError: if they are no numbers.
        """
        if checks.number("temperature", temperature) < 0:
            raise ValueError(f"temperature must be at least 0 and finite, got {temperature}")
        if top_p is not None and not 0 < checks.number("top_p", top_p) <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {top_p}; None keeps all tokens")
        checks.optional(top_k=top_k)
        if not temperature and (top_k, top_p) != (None, None):
            raise ValueError(
                f"top_k={top_k} and top_p={top_p} limit what is drawn, and temperature=0 draws "
                f"nothing: it takes the most likely token; set a temperature, or drop them"
            )
        scalar = None if top_p is None else jnp.float32(top_p)
        return cls(jnp.float32(temperature) if temperature else None, top_k, scalar)

    def choose(self, key: jax.Array | None, logits: jax.Array) -> jax.Array:
        """Draw tokens int32 [B] by logits [B, V]; a row's draw depends on key and its index."""
        if self.temperature is None or key is None:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)

        def limit(logits: jax.Array, rule: Self) -> jax.Array:
            logits = logits / rule.temperature
            logits = logits if rule.top_k is None else top_k(logits, rule.top_k)
            return logits if rule.top_p is None else top_p(logits, rule.top_p)

        limited = sharding.auto(limit, ("batch", None), logits, self)
        # The greatest of logits with Gumbel noise is distributed as their softmax.
        noise = jax.random.gumbel(key, limited.shape, limited.dtype)
        return jnp.argmax(limited + sharding.like(noise, limited), axis=-1).astype(jnp.int32)
