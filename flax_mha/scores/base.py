"""What a score function is, and what is done with several of them."""

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
    """Makes a parameter of a module."""

    def __call__(
        self, name: str, shape: shapes.Shape, names: Names, init: Initializer = ..., /
    ) -> jax.Array:
        """That of a name and a shape, with logical names of its axes."""
        ...


class ScoreMod(Node):
    """The base of all: a function of a score and of where it stands.

    A subclass that says `vectors = True` sees the vectors of query and key too, and defines
    `of_vectors` in place of `__call__`.
    """

    vectors = False

    def bind(self, dims: Dims) -> Self:
        """Check the arrays against a call; those over the scores become a `ScoreArray`."""
        del dims
        return self

    def __call__(self, score: jax.Array, at: At) -> jax.Array:
        """The new score, of the same shape and dtype."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(score, at)")

    def of_vectors(self, score: jax.Array, at: At, q: jax.Array, k: jax.Array) -> jax.Array:
        """The new score, where `vectors` is true.

        Args:
          score: [..., T, S], of a whole call or of a tile, float32 at least.
          at: where it stands; `at.head[..., 0, 0]` has the axes before those two.
          q: [..., T, H], the queries times the scale of the call, in the dtype of the score.
          k: [..., S, H], the keys likewise. Under a mask what is not finite is 0 in q and k; it
            shows in the score.
        """
        raise NotImplementedError(f"{type(self).__name__} must define of_vectors(score, at, q, k)")

    def learned(self, num_heads: int, head_dim: int, make: Make) -> Self:
        """With the arrays that it lacks, as parameters of a module of N heads of H features."""
        del num_heads, head_dim, make
        return self


def learned(given: Any, num_heads: int, head_dim: int, make: Make) -> tuple[ScoreMod, ...]:
    """The scores of a module, with the arrays that they lack as its parameters.

    Args:
      given: its field.
      num_heads: N.
      head_dim: H.
      make: makes its parameters. Of several of one name the second is called `name_1`.
    """
    count: collections.Counter[str] = collections.Counter()

    def numbered(
        name: str, shape: shapes.Shape, names: Names, init: Initializer = INIT, /
    ) -> jax.Array:
        count[name] += 1
        name = name if count[name] == 1 else f"{name}_{count[name] - 1}"
        return make(name, shape, names, init)

    return tuple(mod.learned(num_heads, head_dim, numbered) for mod in as_scores(given))


def without_vectors(what: str, *given: Sequence[ScoreMod]) -> None:
    """No score may see queries and keys of a layer whose own are not those of its heads."""
    names = [type(mod).__name__ for scores in given for mod in as_scores(scores) if mod.vectors]
    if names:
        raise ValueError(
            f"{what} has no scores that see queries and keys, for those that it multiplies are not "
            f"those of its heads, got {', '.join(names)}; leave it out"
        )


def as_scores(given: Any) -> tuple[ScoreMod, ...]:
    """A sequence of them as a tuple."""
    if isinstance(given, ScoreMod):
        raise TypeError(
            f"scores must be a sequence, got one {type(given).__name__}; give it as "
            f"scores=({type(given).__name__}(…),), with the comma"
        )
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise TypeError(
            f"scores must be a sequence of those in flax_mha.scores, got {checks.describe(given)}; "
            f"give scores=(SoftCap(50.0),), say, or () for none"
        )
    for mod in given:
        if isinstance(mod, ScoreMod):
            continue
        remedy = "give one of those in flax_mha.scores"
        if isinstance(mod, type):
            remedy = f"give {mod.__name__}(…), with its parentheses"
        elif callable(mod):
            remedy = "give scores.Score(fn), a function (score, row, head, i, j) -> score"
        raise TypeError(f"scores must be of flax_mha.scores, got {checks.describe(mod)}; {remedy}")
    return tuple(given)


def changed(mod: ScoreMod, score: jax.Array, at: At, vectors: Vectors | None = None) -> jax.Array:
    """What one of them makes of a score, in its shape and dtype; a user's own may be mistaken."""
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
