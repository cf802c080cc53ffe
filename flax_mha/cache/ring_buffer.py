"""Ring buffers: the token at position p is in slot p mod S, and the last S tokens are held."""

import jax
import jax.numpy as jnp

from flax_mha import shapes
from flax_mha.inputs import Integers

# Beyond the position of any token: that of a slot which holds none, and the length of a row whose
# tokens are lost.
FAR = 2**30


def positions(length: jax.Array, S: int) -> jax.Array:
    """Int32 [*B, S], where the token in each slot stands, FAR where there is none.

    Args:
      length: int32 [*B], tokens so far.
      S: slots.
    """
    slot = shapes.lead(jnp.arange(S, dtype=jnp.int32), length.ndim + 1)
    last = length[..., None] - 1
    # The last of each slot's positions before the length.
    found = last - (last - slot) % S
    return jnp.where(found < 0, FAR, found)


def forgotten(q_positions: jax.Array, written: jax.Array, S: int, window: int) -> jax.Array:
    """Whether slots of tokens that those queries [*B, T] see have been written over, [*B, T].

    Args:
      q_positions: int32 [*B, T].
      written: int32 [*B], the greatest length of the row so far.
      S: slots.
      window: how many tokens before itself a token sees.
    """
    return jnp.maximum(q_positions - window, 0) < written[..., None] - S


def truncated(
    length: jax.Array, written: jax.Array | None, to: Integers, S: int,
    window: jax.Array | int | None,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Lengths [*B] cut to `to`, and what is then `written`: FAR of rows that lack what they need.

    Those are rows that were lost before, whose slots of a ring have been written over, or of which
    fewer than no tokens are to stay. A row of no tokens lacks nothing.
    """
    to = jnp.asarray(shapes.lead(to, length.ndim))
    new = jnp.minimum(length, to)
    if window is None or written is None:
        lost = (length >= FAR) & (new > 0)
    else:
        # Tokens from here on are seen by those to come.
        first = jnp.maximum(new - window, 0)
        lost = first < jnp.minimum(new, written - S)
        written = jnp.where(new == 0, 0, written)
    lost |= to < 0
    return jnp.where(lost, FAR, new), None if written is None else jnp.where(lost, FAR, written)
