"""What a score function is, and what is done with several of them."""

import collections
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct

from flax_mha import inputs, shapes
from flax_mha.grid import At
from flax_mha.shapes import Dims

# Makes the parameter of that name and shape.
Make: TypeAlias = Callable[[str, shapes.Shape], jax.Array]
# As T5X has it, for parameters of scores.
INIT = jax.nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")


class ScoreMod(struct.PyTreeNode):
    """The base of all: a function of a score and of where it stands."""

    def bind(self, dims: Dims) -> Self:
        """Checks the arrays against a call; those that lie over the scores become a `Grid`."""
        del dims
        return self

    def __call__(self, score: jax.Array, at: At) -> jax.Array:
        """The new score, of the same shape and dtype."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(score, at)")

    def learned(self, num_heads: int, make: Make) -> Self:
        """With the arrays that it lacks, as parameters of a module."""
        del num_heads, make
        return self


def learned(given: Any, num_heads: int, make: Make) -> tuple[ScoreMod, ...]:
    """The scores of a module, with the arrays that they lack as its parameters.

    Args:
      given: its field.
      num_heads: N.
      make: gives the parameter of a name and a shape, its first axis the heads. Of several of one
        name the second is called `name_1`.
    """
    count: collections.Counter[str] = collections.Counter()

    def numbered(name: str, shape: shapes.Shape) -> jax.Array:
        count[name] += 1
        return make(name if count[name] == 1 else f"{name}_{count[name] - 1}", shape)

    return tuple(mod.learned(num_heads, numbered) for mod in as_scores(given))


def as_scores(given: Any) -> tuple[ScoreMod, ...]:
    """A sequence of them as a tuple."""
    if isinstance(given, ScoreMod):
        raise TypeError(
            f"scores must be a sequence, got one {type(given).__name__}; give it as "
            f"scores=({type(given).__name__}(…),), with the comma"
        )
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise TypeError(
            f"scores must be a sequence of those in flax_mha.scores, got {inputs.came(given)}; "
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
        raise TypeError(f"scores must be of flax_mha.scores, got {inputs.came(mod)}; {remedy}")
    return tuple(given)


def changed(mod: ScoreMod, score: jax.Array, at: At) -> jax.Array:
    """What one of them makes of a score, in its shape and dtype; a user's own may be mistaken."""
    new = mod(score, at)
    name = type(mod).__name__
    if not jnp.issubdtype(getattr(new, "dtype", bool), jnp.floating):
        raise TypeError(
            f"{name} must give the new score, real and floating point, got {inputs.came(new)}; "
            f"return it from the function"
        )
    remedy = "compute it from the score and the places that are given, pair by pair"
    shapes.check_broadcasts(f"what {name} gives", new.shape, score.shape, "the score", remedy)
    return jnp.broadcast_to(new, score.shape).astype(score.dtype)
