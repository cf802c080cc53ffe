"""The base class of score functions, and helpers to read and apply them."""

import collections
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp
from flax.typing import Initializer

from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import At, with_jax_arrays
from flax_mha.base.shapes import Dims
from flax_mha.base.trees import Struct

# Scaled queries [..., T, H] and keys [..., S, H] of the scores [..., T, S].
Vectors: TypeAlias = tuple[jax.Array, jax.Array]
# T5X's initializer of relative position biases.
INIT = jax.nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")


# Creates a parameter from its name, shape, logical names and perhaps initializer.
Make: TypeAlias = Callable[..., jax.Array]


class ScoreMod(Struct):
    """The base class of score functions, which compute a new score from a score and its place.

    A subclass with `vectors = True` defines `of_vectors` instead of `__call__`.
    """

    vectors = False

    def bind(self, dims: Dims) -> Self:
        """Check the arrays against the sizes of a call, and wrap those over scores."""
        return self

    def __call__(self, score: jax.Array, at: At) -> jax.Array:
        """Return the new score, of the same shape and dtype."""
        raise NotImplementedError

    def of_vectors(self, score: jax.Array, at: At, q: jax.Array, k: jax.Array) -> jax.Array:
        """Return the new score, of the same shape and dtype. Called if `vectors` is True.

        Args:
          score: [..., T, S], the scores of a call or of a tile, float32 or wider.
          at: the coordinates of the scores.
          q: [..., T, H], the scaled queries in the score's dtype.
          k: [..., S, H], the keys in the score's dtype.
        """
        raise NotImplementedError

    def learned(self, num_heads: int, head_dim: int, make: Make) -> Self:
        """Return the function with its missing arrays, parameters made for N heads of H features.

        make(name, shape, names, init=INIT) creates one.
        """
        return self


def learned(scores: Any, num_heads: int, head_dim: int, make: Make) -> tuple[ScoreMod, ...]:
    """Call `ScoreMod.learned` of several functions. A repeated name gets a suffix `_1`, `_2`, …"""
    count: collections.Counter[str] = collections.Counter()

    def numbered(
        name: str, shape: shapes.Shape, names: Any, init: Initializer = INIT, /
    ) -> jax.Array:
        count[name] += 1
        name = name if count[name] == 1 else f"{name}_{count[name] - 1}"
        return make(name, shape, names, init)

    return tuple(mod.learned(num_heads, head_dim, numbered) for mod in as_scores(scores))


def without_vectors(name: str, *fields: Sequence[ScoreMod]) -> None:
    """Check that a layer has no scores of vectors, if its products are not only q·kᵀ of heads."""
    names = [type(mod).__name__ for scores in fields for mod in as_scores(scores) if mod.vectors]
    if names:
        raise ValueError(
            f"{name} must have no scores of query and key vectors, because its products are not of "
            f"only its heads' queries and keys, got {', '.join(names)}; leave it out"
        )


def as_scores(scores: Any) -> tuple[ScoreMod, ...]:
    """Check a sequence of score functions, and return it as a tuple."""
    if not isinstance(scores, Sequence) or not all(isinstance(x, ScoreMod) for x in scores):
        raise TypeError(
            f"scores must be a sequence of flax_mha.scores, got {checks.describe(scores)}; give "
            f"scores=(SoftCap(50.0),), say, with the comma, (Score(fn),), or () for none"
        )
    return tuple(scores)


def changed(mod: ScoreMod, score: jax.Array, at: At, vectors: Vectors | None = None) -> jax.Array:
    """Apply a score function, check its result, and restore the score's shape and dtype."""
    mod = with_jax_arrays(mod)
    new = mod.of_vectors(score, at, *vectors) if vectors and mod.vectors else mod(score, at)
    name = type(mod).__name__
    if not jnp.issubdtype(getattr(new, "dtype", bool), jnp.floating):
        raise TypeError(
            f"{name} must return the new score, real and floating point, got "
            f"{checks.describe(new)}; return it from the function"
        )
    remedy = "compute it from the given score and coordinates, pair by pair"
    shapes.check_broadcasts(f"{name}'s result", new.shape, score.shape, "the score", remedy)
    return jnp.broadcast_to(new, score.shape).astype(score.dtype)
