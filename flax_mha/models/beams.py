"""Beam search: live candidates for each prompt, and apart from them those that have ended."""

import functools
import math
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import struct

from flax_mha.base import checks


class Generated(NamedTuple):
    """The result of `generate`.

    Attributes:
      tokens: int32 [B, max_new_tokens], padded with the first eos after the end of a sequence.
      lengths: int32 [B], the number of tokens up to and including eos.
      scores: float32 [B], the sum of the log-probabilities of these tokens under the model, without
        temperature, top_k, top_p and min_p. With beams it is divided by lengths ** length_penalty.
    """

    tokens: jax.Array
    lengths: jax.Array
    scores: jax.Array


class BeamSearch(struct.PyTreeNode):
    """A rule of beam search, with the meaning of `transformers`; see `generate`."""

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
        if repr(early_stopping) not in ("False", "True", "'never'"):
            raise ValueError(
                f"early_stopping must be True, False or 'never', got {early_stopping!r}"
            )
        return cls(jnp.float32(length_penalty), early_stopping)

    def normalize(self, log_p: jax.Array, lengths: jax.Array) -> jax.Array:
        """Return the score of a candidate that ends with this log-probability and length."""
        return log_p / lengths.astype(log_p.dtype) ** self.length_penalty


def extend(
    beams: int, eos: tuple[int, ...], log_p: jax.Array, live: Generated, ended: Generated,
    over: jax.Array, rule: BeamSearch,
) -> list[Any]:  # fmt: skip
    """Extend live candidates by a token with log-probabilities [R, V].

    Candidates are R rows, `beams` for each prompt, best first. A score is −∞ if there is none, and
    a live one is not normalized. The search for a prompt may be `over` [R].

    Returns:
      For each new live candidate its parent and token; and the new `live`, `ended` and `over`.
    """
    log_p, live, ended, over = jax.tree.map(
        lambda x: x.reshape(-1, beams, *x.shape[1:]), (log_p, live, ended, over)
    )
    V, most = log_p.shape[-1], live.tokens.shape[-1]
    # top_k takes a NaN first, if it has no sign. That of a missing candidate must not count.
    log_p = jnp.where(jnp.isnan(log_p), jnp.nan, log_p)
    scores = live.scores[..., None]
    total = jnp.where(scores == -jnp.inf, scores, scores + log_p).reshape(-1, V)
    # Each eos may end all candidates, and then as many must remain.
    count = min((1 + max(1, len(eos))) * beams, beams * V)
    # First of each candidate: XLA:TPU sorts a vocabulary, in seconds of compilation, if it is the
    # only row.
    total, token = (x.reshape(-1, beams * x.shape[-1]) for x in jax.lax.top_k(total, min(count, V)))
    total, flat = jax.lax.top_k(total, count)
    parents, token = flat // min(count, V), jnp.take_along_axis(token, flat, -1)
    tokens, lengths, _ = _take(live, parents)
    is_next = jnp.arange(most, dtype=jnp.int32)[None, None] == lengths[..., None]
    tokens = jnp.where(is_next, token[..., None], tokens)
    extended = Generated(tokens, lengths + 1, total)
    stops = ends(token, eos) | (extended.lengths == most)

    total, order = jax.lax.top_k(jnp.where(stops, -jnp.inf, total), beams)
    parents, token, live = _take((parents, token, extended), order)
    live = live._replace(scores=total)
    # Only the first `beams` may end. The others are there to continue.
    new = jax.tree.map(lambda x: x[:, :beams], extended)
    scores = jnp.where(stops[:, :beams] & ~over, rule.normalize(new.scores, new.lengths), -jnp.inf)
    every = jax.tree.map(lambda *x: jnp.concatenate(x, 1), ended, new._replace(scores=scores))
    ended = _take(every, jax.lax.top_k(every.scores, beams)[1])

    # A bound of live scores ends the search at the best ended one, but an estimate at the worst.
    never, worst = rule.early_stopping == "never", ended.scores[:, -1:]
    lengths = jnp.where((rule.length_penalty > 0) & never, most, live.lengths)
    rival = jnp.where((rule.length_penalty <= 0) | never, ended.scores[:, :1], worst)
    over |= rule.normalize(live.scores, lengths)[:, :1] <= rival
    over |= (worst > -jnp.inf) & (rule.early_stopping is True)
    rows = parents + beams * jnp.arange(len(parents), dtype=jnp.int32)[:, None]
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), [rows, token, live, ended, over])


def ends(tokens: jax.Array, eos: tuple[int, ...]) -> jax.Array:
    """Return True for each token that is one of `eos`."""
    return functools.reduce(lambda is_end, token: is_end | (tokens == token), eos, tokens < 0)


# Take candidates [B, n, …] at the indices [B, m] of each prompt.
_take = jax.vmap(lambda tree, index: jax.tree.map(lambda x: x[index], tree))
