"""The base class of masks, and their algebra."""

import functools
import math
import operator
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha.base import checks, shapes, symbols
from flax_mha.base.coordinates import Array, At, ScoreArray, Tiles, whole, with_jax_arrays
from flax_mha.base.shapes import Dims
from flax_mha.base.trees import Struct, is_traced, tree_nodes
from flax_mha.masks.states import EMPTY, FULL, PARTIAL, both, either, is_static, tile_state

# The most pairs that are computed while JAX traces, and at once: a second for each operation.
MOST, _CHUNK = 2**26, 2**22


class Mask(Struct):
    """The base class of all masks."""

    # Makes `ndarray & mask` call the mask's `__rand__` instead of NumPy's operator.
    __array_ufunc__ = None

    def bind(self, dims: Dims) -> "Mask":
        """Check the mask's arrays for a call, and reshape them to [*B|1, N|1, T|1, S|1].

        By default, this binds the masks in its fields.
        """
        bound: Mask = jax.tree.map(
            lambda x: x.bind(dims) if isinstance(x, Mask) else x, self,
            is_leaf=lambda x: isinstance(x, Mask) and x is not self,
        )  # fmt: skip
        return bound

    def check_positions(self, at: At) -> None:
        """Raise an error if a bound mask must be a mistake at the coordinates of all scores."""

    def allowed(self, at: At) -> Array:
        """Return True where a query may see a key: bool, broadcastable to the scores at `at`."""
        raise NotImplementedError

    def tiles(self, tiles: Tiles) -> Array:
        """Return the state of each tile, int, broadcastable to [*B, N, nq, nk].

        EMPTY means that no pair may attend, FULL that all may. PARTIAL is always correct, but lets
        kernels skip nothing. By default, a mask that reads traced values, the row or the head, or
        of more than 2²⁶ pairs, is PARTIAL. Others are evaluated while JAX traces.
        """
        pairs = None if is_traced(self) else _static_pairs(self, tiles.q, tiles.k)
        if pairs is None:
            return tile_state(np.True_, np.False_)
        return tile_state(tiles.greatest(pairs), tiles.least(pairs))

    def max_lookback(self) -> int | None:
        """Return the greatest i − j of a pair that may attend, or None if it is not known."""
        return None

    def block_shape(self) -> tuple[int, int] | None:
        """Return the queries and keys of a block of a block-sparse mask, or None."""
        return None

    def dense(
        self, T: int, S: int | None = None, batch: tuple[int, ...] = (), num_heads: int = 1, *,
        q_positions: Array | int | None = None, kv_positions: Array | int | None = None,
    ) -> jax.Array:  # fmt: skip
        """Return the mask as a table, bool [*batch, num_heads, T, S].

        Args:
          T: the number of queries.
          S: the number of keys (default: T).
          batch: the sizes of the batch axes.
          num_heads: the number of heads.
          q_positions: the positions of the queries, int [T] or [*batch, T], or of the first one.
          kv_positions: the positions of the keys, int [S] or [*batch, S], or of the first one.
        """
        S = T if S is None else S
        dims = Dims(tuple(batch), T, S, num_heads, num_heads, 1, 1)
        q_pos = shapes.positions("q_positions", q_positions, (*dims.B, T), "T")
        k_pos = shapes.positions("kv_positions", kv_positions, (*dims.B, S), "S")
        return jnp.broadcast_to(evaluate(self.bind(dims), whole(dims, q_pos, k_pos)), dims.logits)

    def show(self, T: int, S: int | None = None, **options: Any) -> str:
        """Return a drawing of `dense` for the first example and head, with █ for True.

        The last line says how many pairs may attend, and how many queries have no key.
        """
        table = np.asarray(self.dense(T, S, **options))
        lines = table.reshape(-1, *table.shape[-2:])[0]
        drawn = ["".join("█" if allowed else "·" for allowed in line) for line in lines]
        return "\n".join([*drawn, in_words(*count(table))])

    def __and__(self, other: "MaskLike") -> "Mask":
        return And((self, as_mask(other)))

    def __rand__(self, other: "MaskLike") -> "Mask":
        return And((as_mask(other), self))

    def __or__(self, other: "MaskLike") -> "Mask":
        return Or((self, as_mask(other)))

    def __ror__(self, other: "MaskLike") -> "Mask":
        return Or((as_mask(other), self))

    def __invert__(self) -> "Mask":
        return Not(self)

    def __bool__(self) -> bool:
        # `and` and `or` would drop one of two masks, and `not` the mask itself.
        raise TypeError(
            "a mask is neither true nor false: masks are joined by &, | and ~, not by and, or and "
            "not; write Causal() & Lengths(n), and `mask is not None` to test for a mask"
        )


MaskLike: TypeAlias = Mask | jax.Array | np.ndarray


class And(Mask):
    """A mask that allows a pair if all of its masks allow it."""

    masks: tuple[Mask, ...]

    def check_positions(self, at: At) -> None:
        for mask in self.masks:
            mask.check_positions(at)

    def allowed(self, at: At) -> Array:
        return functools.reduce(operator.and_, (evaluate(mask, at) for mask in self.masks))

    def tiles(self, tiles: Tiles) -> Array:
        return functools.reduce(both, (mask.tiles(tiles) for mask in self.masks))

    def max_lookback(self) -> int | None:
        lookbacks = [mask.max_lookback() for mask in self.masks]
        return min((x for x in lookbacks if x is not None), default=None)


class Or(Mask):
    """A mask that allows a pair if any of its masks allows it."""

    masks: tuple[Mask, ...]

    def allowed(self, at: At) -> Array:
        return functools.reduce(operator.or_, (evaluate(mask, at) for mask in self.masks))

    def tiles(self, tiles: Tiles) -> Array:
        return functools.reduce(either, (mask.tiles(tiles) for mask in self.masks))


class Not(Mask):
    """A mask that allows a pair if its mask forbids it."""

    mask: Mask

    def allowed(self, at: At) -> Array:
        return ~evaluate(self.mask, at)

    def tiles(self, tiles: Tiles) -> Array:
        return FULL - self.mask.tiles(tiles)


class Dense(Mask):
    """A table, True where the query may see the key.

    Attributes:
      array: bools, or the numbers 1 and 0, broadcastable to [*B, N, T, S]. Another number is an
        error in a static array. In a traced one it makes the score of its pair NaN, even if another
        mask hides the pair.
    """

    array: Any

    def bind(self, dims: Dims) -> Self:
        array = checks.array("a mask", self.array)
        remedy = (
            "give a mask of keys [*B, S] as masks.Keys(mask), [*B, T, S] as mask[..., None, :, :]"
        )
        shapes.check_broadcasts("mask", array.shape, dims.logits, "[*B, N, T, S]", remedy)
        _warn_of_rows(array.shape, dims)
        # Convert first: inside jit, reshaping would trace the array.
        array = checks.as_numpy(array)
        if array.dtype != bool and not checks.is_concrete(array):
            # 0 is EMPTY, 1 is FULL, and others are PARTIAL.
            array = tile_state(array != 0, array == 1)
        elif array.dtype != bool:
            values = np.asarray(array)
            wrong = values[(values != 0) & (values != 1)]
            if wrong.size:
                raise ValueError(
                    f"a mask must be of bools, or of 1 (may attend) and 0, got {wrong[0]} in "
                    f"{array.dtype}; compare it with something, as in ids > 0, or give scores as "
                    f"bias="
                )
            array = array.astype(bool)
        return self.replace(array=ScoreArray(shapes.lead(array, len(dims.logits))))

    def allowed(self, at: At) -> Array:
        return jnp.asarray(self._bools())

    def tiles(self, tiles: Tiles) -> Array:
        bools = self._bools()
        return tile_state(tiles.greatest(bools), tiles.least(bools))

    def _bools(self) -> Array:
        array = self.array.array
        return array if array.dtype == bool else array != EMPTY


class TracedNumbers(Mask):
    """A bound mask with tables of traced numbers, which make scores NaN if not 0 or 1."""

    mask: Mask

    def others(self) -> Array:
        """Return True for pairs whose number is not 0 or 1, [*B|1, N|1, T|1, S|1]."""
        return functools.reduce(operator.or_, [x == PARTIAL for x in _number_tables(self)])

    def allowed(self, at: At) -> Array:
        return evaluate(self.mask, at) | self.others()

    def tiles(self, tiles: Tiles) -> Array:
        return jnp.where(tiles.greatest(self.others()), np.int8(PARTIAL), self.mask.tiles(tiles))


def _number_tables(mask: Mask) -> list[Array]:
    tables = (x.array for x in tree_nodes(mask) if isinstance(x, Dense))
    return [x.array for x in tables if isinstance(x, ScoreArray) and x.array.dtype != bool]


def resolve(mask: Mask, at: At) -> Mask:
    """Return a bound mask in the form that kernels read, given the coordinates of all scores.

    Masks whose method `resolve(at)` reads all positions of the call are replaced by its result.
    """
    resolved: Mask = jax.tree.map(
        lambda x: x.resolve(at) if hasattr(x, "resolve") else x, mask,
        is_leaf=lambda x: hasattr(x, "resolve"),
    )  # fmt: skip
    return TracedNumbers(resolved) if _number_tables(resolved) else resolved


def evaluate(mask: Mask, at: At) -> Array:
    """Return `mask.allowed(at)` with all axes, after a check that it returns bools."""
    allowed: Any = with_jax_arrays(mask).allowed(at)
    if isinstance(allowed, bool):
        allowed = np.asarray(allowed)
    name = type(mask).__name__
    if getattr(allowed, "dtype", None) != np.bool_:
        raise TypeError(
            f"{name} must return bools, True where the query may see the key, got "
            f"{checks.describe(allowed)}; return a comparison, such as j <= i"
        )
    shape = jnp.broadcast_shapes(*(x.shape for x in at))
    remedy = "compute it from the given coordinates, pair by pair"
    shapes.check_broadcasts(f"{name}'s result", allowed.shape, shape, "the coordinates", remedy)
    return shapes.lead(allowed, len(shape))


def as_mask(mask: MaskLike) -> Mask:
    """Return a mask unchanged, or an array as `Dense`."""
    if isinstance(mask, Mask):
        return mask
    if hasattr(mask, "dtype") and hasattr(mask, "shape"):
        return Dense(mask)
    raise TypeError(
        f"a mask must be a flax_mha.masks.Mask or a bool array, got {checks.describe(mask)}; give "
        f"a function as masks.Predicate(fn), and skip None by masks.combine(a, b)"
    )


def combine(*masks: MaskLike | None) -> Mask | None:
    """Join masks by `&`, and skip None. Return None if all are None."""
    joined = tuple(as_mask(mask) for mask in masks if mask is not None)
    return And(joined) if len(joined) > 1 else next(iter(joined), None)


def count(table: np.ndarray) -> tuple[float, int]:
    """Return the share of pairs [..., T, S] that may attend, and the number of queries without."""
    return float(table.mean()) if table.size else 0.0, int((~table.any(-1)).sum())


def in_words(share: float, no_key: int) -> str:
    """Return the numbers of `count` as a sentence."""
    queries = {0: "every query has a key", 1: "1 query has no key"}
    keys = queries.get(no_key, f"{no_key:,} queries have no key")
    return f"{100 * share:.3g}% of pairs may attend, and {keys}"


def count_known(mask: Mask, dims: Dims, *positions: Array | int | None) -> tuple[float, int] | None:
    """Return `count` for a call's mask; None if it is traced, symbolic or of more than 2²⁶ pairs.

    Rows of the batch and heads that share a mask are counted once.
    """
    q, k = positions
    if symbols.is_symbolic(*dims.B, dims.T, dims.S):
        return None
    with jax.ensure_compile_time_eval():
        at = whole(
            dims, shapes.positions("q_positions", q, (*dims.B, dims.T), "T"),
            shapes.positions("kv_positions", k, (*dims.B, dims.S), "S"),
        )  # fmt: skip
        if is_traced((mask, at)):
            return None
        mask = mask.bind(dims)
        shape = jax.eval_shape(lambda *at: evaluate(mask, At(*at)), *at).shape
        if not 0 < math.prod((*shape[:-2], dims.T, dims.S)) <= MOST:
            return None
        table = np.asarray(evaluate(mask, at))
    return count(np.broadcast_to(table, (*shape[:-2], dims.T, dims.S)))


def _static_pairs(mask: Mask, q: Array | None, k: Array | None) -> np.ndarray | None:
    """Return the pairs of queries [*B|1, 1, T, 1] and keys [*B|1, 1, 1, S] that may attend.

    Return None for traced positions, masks that read the row or the head, and too many pairs.
    """
    if q is None or k is None or not is_static(q, k) or q.size * k.size > MOST:
        return None
    first = np.zeros([1] * q.ndim, np.int32)
    jaxpr = jax.make_jaxpr(lambda *at: evaluate(mask, At(*at)))(first, first, q, k).jaxpr
    read = [x for eqn in jaxpr.eqns for x in eqn.invars] + jaxpr.outvars
    if any(x is index for x in read for index in jaxpr.invars[:2]):
        return None
    step = max(1, _CHUNK // k.size)
    parts = []
    with jax.ensure_compile_time_eval():
        for start in range(0, q.shape[-2], step):
            rows = q[..., start : start + step, :]
            parts.append(np.asarray(evaluate(mask, At(first, first, rows, k))))
            if parts[0].shape[-2] < rows.shape[-2]:
                # All queries see the same keys.
                return parts[0]
    return np.concatenate(parts, -2)


def lengths_as_scores(name: str, lengths: Any, dims: Dims, per_query: bool = False) -> ScoreArray:
    """Reshape lengths [], [*B] or, per query, [*B, T] to [*B|1, 1, 1|T, 1]."""
    lengths = checks.integers(name, lengths)
    expected = {"[]": (), "[*B]": dims.B} | ({"[*B, T]": (*dims.B, dims.T)} if per_query else {})
    remedy = "give one length for each example of the batch"
    shapes.check_shape(name, lengths, expected, remedy)
    if lengths.ndim <= len(dims.B):
        lengths = lengths[..., None]
    return ScoreArray(shapes.lead(lengths[..., None, :, None], len(dims.logits)))


def _warn_of_rows(shape: shapes.Shape, dims: Dims) -> None:
    """Warn if a shape could also be meant for the examples of the batch."""
    other = {
        (*dims.B, dims.S): "masks.Keys(mask)",
        (*dims.B, dims.T, dims.S): "mask[..., None, :, :]",
    }.get(shape)
    if other and len(shape) < len(dims.logits) and math.prod(dims.B) > 1:
        axes = ", ".join(("N", "T", "S")[-len(shape) :])
        checks.warn(
            f"a mask of shape {shape} is read as [{axes}], as NumPy broadcasts, but could be meant "
            f"for the examples of the batch; write {other} for these, or mask[None] to confirm"
        )
