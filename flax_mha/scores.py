"""What happens to a score between q·kᵀ·scale and the mask.

>>> layer = MultiHeadAttention(8, scores=(SoftCap(50.0), Alibi()))

Scores are applied in the order given. Like masks they are pytrees: their arrays take gradients.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_mha import inputs, shapes
from flax_mha.grid import Array, At, Grid
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


class Bias(ScoreMod):
    """score + array.

    Attributes:
      array: broadcastable to [*B, N, T, S].
    """

    array: Any

    def bind(self, dims: Dims) -> Self:
        """See `ScoreMod.bind`."""
        array = jnp.asarray(inputs.floating("bias", self.array))
        shapes.check_broadcasts(
            "bias", array.shape, dims.logits, "[*B, N, T, S]",
            "a bias without heads needs the axis: bias[..., None, :, :]",
        )  # fmt: skip
        return self.replace(array=Grid(shapes.lead(array, len(dims.logits))))

    def __call__(self, score: jax.Array, at: At) -> jax.Array:
        """See `ScoreMod.__call__`."""
        return score + self.array.array.astype(score.dtype)


class SoftCap(ScoreMod):
    """c·tanh(score / c): no score beyond ±c.

    Source: Gemma Team, "Gemma 2", 2024.
    """

    cap: float = struct.field(pytree_node=False)

    def bind(self, dims: Dims) -> Self:
        """See `ScoreMod.bind`."""
        if not inputs.number("SoftCap.cap", self.cap) > 0:
            raise ValueError(f"SoftCap needs a cap above 0, got {self.cap}")
        return self

    def __call__(self, score: jax.Array, at: At) -> jax.Array:
        """See `ScoreMod.__call__`."""
        return self.cap * jnp.tanh(score / self.cap)


class Alibi(ScoreMod):
    """score − slope[head]·|i − j|.

    Attributes:
      slopes: [N]; by default the geometric sequence of the paper.

    Source: Press et al., "Train Short, Test Long: Attention with Linear Biases", 2022.
    """

    slopes: Any = None

    def bind(self, dims: Dims) -> Self:
        """See `ScoreMod.bind`."""
        slopes = alibi_slopes(dims.N) if self.slopes is None else self.slopes
        slopes = _per_head("Alibi.slopes", slopes, dims)
        return self.replace(slopes=Grid(shapes.lead(slopes[:, None, None], len(dims.logits))))

    def __call__(self, score: jax.Array, at: At) -> jax.Array:
        """See `ScoreMod.__call__`."""
        slope = self.slopes.array.astype(score.dtype)
        return score - slope * jnp.abs(at.q - at.k).astype(score.dtype)


class RelativeBias(ScoreMod):
    """score + table[head, bucket(j − i)], the relative position bias of T5.

    Half of the buckets are exact distances; the others grow logarithmically up to max_distance.

    >>> encoder = Encoder(6, block, scores=(RelativeBias(),))  # one table for all layers, as T5 has

    Attributes:
      table: [N, buckets]; None in the field `scores` of a layer or a stack, whose parameter
        `relative_bias` it then is.
      bidirectional: whether keys before and after the query have buckets of their own; if not,
        keys after it share that of distance 0.
      max_distance: from which all distances share the last bucket.
      buckets: of a table that is to be made.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning", 2020.
    """

    table: Any = None
    bidirectional: bool = struct.field(pytree_node=False, default=True)
    max_distance: int = struct.field(pytree_node=False, default=128)
    buckets: int = struct.field(pytree_node=False, default=32)

    def learned(self, num_heads: int, make: Make) -> Self:
        """See `ScoreMod.learned`."""
        if self.table is not None:
            return self
        inputs.positive(**{"RelativeBias.buckets": self.buckets})
        return self.replace(table=make("relative_bias", (num_heads, self.buckets)))

    def bind(self, dims: Dims) -> Self:
        """See `ScoreMod.bind`."""
        if self.table is None:
            raise ValueError(
                "RelativeBias must have a table [N, buckets] here, got None; give one, or give it "
                "in the field scores= of a layer or a stack, which learns one"
            )
        table = jnp.asarray(inputs.floating("RelativeBias.table", self.table))
        inputs.flag("RelativeBias.bidirectional", self.bidirectional)
        if table.ndim != 2 or table.shape[0] != dims.N or table.shape[1] < 4:
            raise ValueError(
                f"RelativeBias.table must have shape [N, buckets] with N={dims.N} and at least 4 "
                f"buckets, got {table.shape}"
            )
        _check_distance(table.shape[1], self.bidirectional, self.max_distance)
        return self.replace(table=table)

    def __call__(self, score: jax.Array, at: At) -> jax.Array:
        """See `ScoreMod.__call__`."""
        bucket = relative_bucket(
            at.k - at.q, self.table.shape[1], self.bidirectional, self.max_distance
        )
        table = self.table.astype(score.dtype)
        if at.head.size == 1:
            row = jax.lax.dynamic_index_in_dim(table, at.head.reshape(()), keepdims=False)
            return score + jnp.take(row, bucket)
        return score + jnp.take(table.reshape(-1), at.head * table.shape[1] + bucket)


class Score(ScoreMod):
    """Any rule: fn(score, row, head, i, j, *args).

    Attributes:
      fn: a function of the score, of four integer arrays that broadcast to it (the index of the
        batch row and the head, the positions of query and key) and of args; returns the new score.
      args: arrays and numbers that fn needs; floating arrays take gradients. Traced arrays must be
        given here, not in fn's closure.
    """

    fn: Callable[..., jax.Array] = struct.field(pytree_node=False)
    args: tuple[jax.Array, ...] = ()

    def bind(self, dims: Dims) -> Self:
        """See `ScoreMod.bind`."""
        args = inputs.arguments("Score.args", self.args)
        inputs.function(
            "Score.fn", self.fn, "(score, row, head, i, j, *args) -> score",
            "take the score, its row, its head, the positions of query and key, then args",
            5 + len(args),
        )  # fmt: skip
        return self.replace(args=args)

    def __call__(self, score: jax.Array, at: At) -> jax.Array:
        """See `ScoreMod.__call__`."""
        return self.fn(score, at.row, at.head, at.q, at.k, *self.args)


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


def alibi_slopes(num_heads: int) -> np.ndarray:
    """The slopes of ALiBi, float32 [N]: 2^(−8/n), 2^(−16/n), … for n heads, a power of two.

    For other numbers of heads, those of the power below, then every other of the power above.
    """
    n = 2 ** (num_heads.bit_length() - 1)
    first = 2.0 ** (-8.0 * np.arange(1, n + 1) / n)
    between = 2.0 ** (-8.0 * np.arange(1, 2 * n + 1, 2) / (2 * n))
    return np.concatenate([first, between])[:num_heads].astype(np.float32)


def relative_bucket(
    distance: Array, buckets: int, bidirectional: bool = True, max_distance: int = 128
) -> jax.Array:
    """The bucket, int32, of each distance j − i; see `RelativeBias`."""
    _check_distance(buckets, bidirectional, max_distance)
    first = jnp.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        first = jnp.where(distance > 0, buckets, 0)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    exact = buckets // 2
    # The argument stays above 0: the branch not taken must be finite too.
    far = jnp.maximum(distance, exact).astype(jnp.float32) / exact
    steps = jnp.log(far) / np.log(max_distance / exact) * (buckets - exact)
    far_bucket = jnp.minimum(exact + steps.astype(jnp.int32), buckets - 1)
    return first + jnp.where(distance < exact, distance, far_bucket)


def _check_distance(buckets: int, bidirectional: bool, max_distance: int) -> None:
    """Buckets that grow up to max_distance need room after the exact ones."""
    exact = (buckets // 2 if bidirectional else buckets) // 2
    inputs.positive(max_distance=max_distance)
    if max_distance <= exact:
        raise ValueError(
            f"max_distance must exceed {exact}, the distances with a bucket of their own out of "
            f"{buckets} buckets, got {max_distance}; raise it, or give a table of fewer buckets"
        )


def _per_head(name: str, x: Any, dims: Dims) -> jax.Array:
    x = jnp.asarray(inputs.floating(name, x))
    if x.shape != (dims.N,):
        raise ValueError(f"{name} must have shape [N] = {(dims.N,)}, got {x.shape}")
    return x
