"""The base of score functions, and how several of them are read and applied."""

import collections
from collections.abc import Sequence
from typing import Any, Protocol, Self, TypeAlias

import jax
import jax.numpy as jnp
from flax.typing import Initializer

from flax_mha.base import checks, shapes
from flax_mha.base.coordinates import At, Node
from flax_mha.base.shapes import Dims

# Queries [..., T, H] times the scale of the call, and keys [..., S, H], of the scores [..., T, S].
Vectors: TypeAlias = tuple[jax.Array, jax.Array]
Names: TypeAlias = tuple[str | None, ...]
# As T5X has it, for parameters of scores.
INIT = jax.nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")


class Make(Protocol):
    """A function that makes a parameter of a module."""

    def __call__(
        self, name: str, shape: shapes.Shape, names: Names, init: Initializer = ..., /
    ) -> jax.Array:
        """Make the parameter of a name and a shape, with logical names of its axes."""
        ...


class ScoreMod(Node):
    """The base of all scores: a function of a score and its coordinates.

    A subclass with `vectors = True` sees the vectors of query and key too, and defines
    `of_vectors` in place of `__call__`.
    """

    vectors = False

    def bind(self, dims: Dims) -> Self:
        """Check the arrays against a call; those over the scores become a `ScoreArray`."""
        del dims
        return self

    def __call__(self, score: jax.Array, at: At) -> jax.Array:
        """Return the new score, of the same shape and dtype."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(score, at)")

    def of_vectors(self, score: jax.Array, at: At, q: jax.Array, k: jax.Array) -> jax.Array:
        """Return the new score, if `vectors` is True.

        Args:
          score: [..., T, S], of a whole call or of a tile, float32 at least.
          at: its coordinates; `at.head[..., 0, 0]` has the axes before those two.
          q: [..., T, H], the queries times the scale of the call, in the dtype of the score.
          k: [..., S, H], the keys, in the same dtype. Under a mask, entries that are not finite
            are 0 in q and k, and show in the score.
        """
        raise NotImplementedError(f"{type(self).__name__} must define of_vectors(score, at, q, k)")

    def learned(self, num_heads: int, head_dim: int, make: Make) -> Self:
        """Return it with the arrays that it lacks, as parameters of a module of N heads of H."""
        del num_heads, head_dim, make
        return self


def learned(scores: Any, num_heads: int, head_dim: int, make: Make) -> tuple[ScoreMod, ...]:
    """Return the scores of a module, with the arrays that they lack as its parameters.

    Args:
      scores: its field.
      num_heads: N.
      head_dim: H.
      make: makes its parameters. The second of one name is called `name_1`.
    """
    count: collections.Counter[str] = collections.Counter()

    def numbered(
        name: str, shape: shapes.Shape, names: Names, init: Initializer = INIT, /
    ) -> jax.Array:
        count[name] += 1
        name = name if count[name] == 1 else f"{name}_{count[name] - 1}"
        return make(name, shape, names, init)

    return tuple(mod.learned(num_heads, head_dim, numbered) for mod in as_scores(scores))


def without_vectors(name: str, *fields: Sequence[ScoreMod]) -> None:
    """Refuse scores that see queries and keys, if a layer multiplies others than its heads'."""
    names = [type(mod).__name__ for scores in fields for mod in as_scores(scores) if mod.vectors]
    if names:
        raise ValueError(
            f"{name} has no scores that see queries and keys, for those that it multiplies are not "
            f"those of its heads, got {', '.join(names)}; leave it out"
        )


def as_scores(scores: Any) -> tuple[ScoreMod, ...]:
    """Return a sequence of scores as a tuple."""
    if isinstance(scores, ScoreMod):
        raise TypeError(
            f"scores must be a sequence, got one {type(scores).__name__}; give it as "
            f"scores=({type(scores).__name__}(…),), with the comma"
        )
    if not isinstance(scores, Sequence) or isinstance(scores, str):
        raise TypeError(
            f"scores must be a sequence of those in flax_mha.scores, got "
            f"{checks.describe(scores)}; give scores=(SoftCap(50.0),), say, or () for none"
        )
    for mod in scores:
        if isinstance(mod, ScoreMod):
            continue
        remedy = "give one of those in flax_mha.scores"
        if isinstance(mod, type):
            remedy = f"give {mod.__name__}(…), with its parentheses"
        elif callable(mod):
            remedy = "give scores.Score(fn), a function (score, row, head, i, j) -> score"
        raise TypeError(f"scores must be of flax_mha.scores, got {checks.describe(mod)}; {remedy}")
    return tuple(scores)


def changed(mod: ScoreMod, score: jax.Array, at: At, vectors: Vectors | None = None) -> jax.Array:
    """Return the new score, in shape and dtype of the old; check a function of a user's own."""
    new = mod.of_vectors(score, at, *vectors) if vectors and mod.vectors else mod(score, at)
    name = type(mod).__name__
    if not jnp.issubdtype(getattr(new, "dtype", bool), jnp.floating):
        raise TypeError(
            f"{name} must give the new score, real and floating point, got {checks.describe(new)}; "
            f"return it from the function"
        )
    remedy = "compute it from the score and the places that are given, pair by pair"
    shapes.check_broadcasts(f"what {name} gives", new.shape, score.shape, "the score", remedy)
    return jnp.broadcast_to(new, score.shape).astype(score.dtype)
