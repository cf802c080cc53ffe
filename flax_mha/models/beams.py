"""Beam search: the best candidates that continue each prompt, and the best that have ended."""

import functools
import math
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import struct

from flax_mha.base import checks


class Candidates(NamedTuple):
    """R token sequences, `beams` consecutive ones for each prompt, best first.

    Attributes:
      tokens: [R, max_new_tokens].
      lengths: [R], the number of generated tokens.
      scores: [R], see `BeamSearch`; −∞ for no candidate.
    """

    tokens: jax.Array
    lengths: jax.Array
    scores: jax.Array


class BeamSearch(struct.PyTreeNode):
    """A rule of beam search, that of `transformers`.

    The score of a live candidate is its log-probability, and the score of an ended one is
    log-probability / length ** length_penalty. Live ones never displace ended ones.

    Attributes:
      length_penalty: the exponent.
      early_stopping: False, True or "never", see `generate`.
    """

    length_penalty: jax.Array
    early_stopping: bool | str = struct.field(pytree_node=False)

    @classmethod
    def checked(cls, length_penalty: float, early_stopping: bool | str, most: int) -> Self:
        """Check a user's settings for at most `most` new tokens, and return their rule."""
        if abs(checks.number("length_penalty", length_penalty)) * math.log(most) > 64:
            raise ValueError(
                f"length_penalty must leave max_new_tokens={most} ** length_penalty a number of "
                f"float32, got {length_penalty}; give one nearer to 0"
            )
        never = isinstance(early_stopping, str) and early_stopping == "never"
        if not (never or isinstance(early_stopping, bool)):
            raise ValueError(
                f"early_stopping must be True, False or 'never', got {early_stopping!r}; False "
                f"stops by an estimate"
            )
        return cls(jnp.float32(length_penalty), early_stopping)

    def extend(
        self, log_p: jax.Array, live: Candidates, ended: Candidates, over: jax.Array,
        eos: tuple[int, ...],
    ) -> tuple[jax.Array, jax.Array, Candidates, Candidates, jax.Array]:  # fmt: skip
        """Extend the live candidates of B prompts by a token.

        Args:
          log_p: float32 [B, beams, V], the log-probabilities of the token.
          live: the live candidates [B, beams].
          ended: the best candidates that have ended.
          over: bool [B, beams], True for a prompt whose search is over.
          eos: the tokens that end a sequence.

        Returns:
          For the new live candidates, their parents among `live` and their tokens, [B, beams]; then
          the new `live`, `ended` and `over`.
        """
        (_, beams, V), most = log_p.shape, live.tokens.shape[-1]
        # A missing candidate stays missing, even if its log-probabilities are NaN. Another NaN
        # must show in the result: top_k takes a NaN first, if it has no sign.
        log_p = jnp.where(jnp.isnan(log_p), jnp.nan, log_p)
        is_missing = live.scores[..., None] == -jnp.inf
        total = jnp.where(is_missing, -jnp.inf, live.scores[..., None] + log_p)
        # Each eos may end all candidates, and then as many must remain.
        count = min((1 + max(1, len(eos))) * beams, beams * V)
        total, flat = jax.lax.top_k(total.reshape(-1, beams * V), count)
        parents, tokens = flat // V, flat % V
        found = _take(live, parents)
        is_next = jnp.arange(most)[None, None] == found.lengths[..., None]
        texts = jnp.where(is_next, tokens[..., None], found.tokens)
        found = Candidates(texts, found.lengths + 1, total)
        stops = ends(tokens, eos) | (found.lengths == most)

        total, order = jax.lax.top_k(jnp.where(stops, -jnp.inf, total), beams)
        parents, tokens, live = _take((parents, tokens, found), order)
        live = live._replace(scores=total)

        # Only the first `beams` may end. The others are there to continue.
        may_end = stops & ~over[:, :1] & (jnp.arange(count) < beams)[None]
        scores = jnp.where(may_end, self._normalize(found.scores, found.lengths), -jnp.inf)
        every = jax.tree.map(
            lambda *x: jnp.concatenate(x, axis=1), ended, found._replace(scores=scores)
        )
        ended = _take(every, jax.lax.top_k(every.scores, beams)[1])
        return parents, tokens, live, ended, over | self._is_over(live, ended)

    def _normalize(self, log_p: jax.Array, lengths: jax.Array) -> jax.Array:
        return log_p / lengths.astype(log_p.dtype) ** self.length_penalty

    def _is_over(self, live: Candidates, ended: Candidates) -> jax.Array:
        """Return bool [B, 1], True if no live candidate is expected to displace an ended one."""
        grows, never = self.length_penalty > 0, self.early_stopping == "never"
        most = live.tokens.shape[-1]
        lengths = jnp.where(grows & never, most, live.lengths)
        hoped = self._normalize(live.scores, lengths)[:, :1]
        # Compare a bound with the best ended candidate, but an estimate with the worst one.
        exact = ~grows | never
        over = hoped <= jnp.where(exact, ended.scores[:, :1], ended.scores[:, -1:])
        is_full = ended.scores[:, -1:] > -jnp.inf
        return over | is_full if self.early_stopping is True else over


def ends(tokens: jax.Array, eos: tuple[int, ...]) -> jax.Array:
    """Return True for each token that is one of `eos`."""
    return functools.reduce(lambda any_, end: any_ | (tokens == end), eos, tokens < 0)


def _take(candidates: Any, index: jax.Array) -> Any:
    """Take candidates [B, n, …] at the indices [B, m] of each prompt."""
    return jax.tree.map(
        lambda x: jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1),
        candidates,
    )
