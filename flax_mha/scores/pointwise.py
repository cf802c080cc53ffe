"""Biases, caps, slopes, and user-defined functions of scores."""

from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import At, ScoreArray
from flax_mha.base.shapes import Dims
from flax_mha.scores.score_mod import ScoreMod


class Bias(ScoreMod):
    """An additive bias, score + array.

    Attributes:
      array: floating, broadcastable to [*B, N, T, S].
    """

    array: Any

    def bind(self, dims: Dims) -> Self:
        array = jnp.asarray(checks.floating("bias", self.array))
        shapes.check_broadcasts(
            "bias", array.shape, dims.logits, "[*B, N, T, S]",
            "a bias without heads needs the axis: bias[..., None, :, :]",
        )  # fmt: skip
        return self.replace(array=ScoreArray(shapes.lead(array, len(dims.logits))))

    def __call__(self, score: jax.Array, at: At) -> jax.Array:
        return score + self.array.array.astype(score.dtype)


class SoftCap(ScoreMod):
    """A soft cap, c·tanh(score / c), which keeps scores within ±c.

    Attributes:
      cap: c, above 0.

    Source: Gemma Team, "Gemma 2", 2024.
    """

    cap: float = struct.field(pytree_node=False)

    def bind(self, dims: Dims) -> Self:
        cap = checks.number("SoftCap.cap", self.cap)
        if cap <= 0:
            raise ValueError(f"SoftCap.cap must be above 0, got {cap}; leave out the SoftCap")
        return self.replace(cap=cap)

    def __call__(self, score: jax.Array, at: At) -> jax.Array:
        return self.cap * jnp.tanh(score / self.cap)


class Alibi(ScoreMod):
    """A linear bias by distance, score − slope[head]·|i − j|.

    Attributes:
      slopes: [N], a slope for each head (default: the paper's, `alibi_slopes`).

    Source: Press et al., "Train Short, Test Long: Attention with Linear Biases", 2022.
    """

    slopes: Any = None

    def bind(self, dims: Dims) -> Self:
        slopes = alibi_slopes(dims.N) if self.slopes is None else self.slopes
        slopes = jnp.asarray(checks.floating("Alibi.slopes", slopes))
        expected = {"[N]": (dims.N,)}
        shapes.check_shape("Alibi.slopes", slopes, expected, "give one for each query head")
        return self.replace(slopes=ScoreArray(shapes.lead(slopes[:, None, None], len(dims.logits))))

    def __call__(self, score: jax.Array, at: At) -> jax.Array:
        slope = self.slopes.array.astype(score.dtype)
        return score - slope * jnp.abs(at.q - at.k).astype(score.dtype)


class Score(ScoreMod):
    """A user-defined function, fn(score, row, head, i, j, *args).

    Attributes:
      fn: a function that returns the new score. It gets the score, four integer arrays (the indices
        of row and head, the positions of query and key), q and k if `vectors`, then args.
      args: arrays and numbers for fn, which may not close over traced arrays.
      vectors: True if fn reads the query and key vectors (see `ScoreMod.of_vectors`).
    """

    fn: Callable[..., jax.Array] = struct.field(pytree_node=False)
    args: tuple[jax.Array, ...] = ()
    vectors: bool = struct.field(pytree_node=False, default=False)

    def bind(self, dims: Dims) -> Self:
        checks.flag("Score.vectors", self.vectors)
        return self.replace(args=checks.arguments(self.args))

    def __call__(self, score: jax.Array, at: At) -> jax.Array:
        return self.fn(score, *at, *self.args)

    def of_vectors(self, score: jax.Array, at: At, q: jax.Array, k: jax.Array) -> jax.Array:
        return self.fn(score, *at, q, k, *self.args)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Return ALiBi's slopes, float32 [N]: 2^(−8/N), 2^(−16/N), … if N is a power of two.

    Otherwise, every second slope for the next power of two follows those for the power below N.
    """
    n = 2 ** (num_heads.bit_length() - 1)
    first = 2.0 ** (-8.0 * np.arange(1, n + 1) / n)
    between = 2.0 ** (-8.0 * np.arange(1, 2 * n + 1, 2) / (2 * n))
    return np.concatenate([first, between])[:num_heads].astype(np.float32)
