"""Scores that see queries and keys, in kernels that see no vectors.

The score functions of a call are traced for a tile, and their operations are divided. Those on
queries alone run in XLA for all queries, and those on keys alone for all keys. They leave some
numbers for each query and each key, such as their products with a table of relative positions. The
kernel runs the other operations, on these numbers.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.extend import core

from flax_mha.base.coordinates import Array, At, ScoreArray, flat_batch, is_score_array
from flax_mha.base.shapes import Dims
from flax_mha.kernels.call.spec import AttentionSpec
from flax_mha.kernels.chips.tpus import heads_first
from flax_mha.kernels.flex.function import CALLS, open_jaxpr
from flax_mha.kernels.flex.operand import KeyNumbers, Operand, QueryNumbers
from flax_mha.kernels.xla.softmax import finite
from flax_mha.kernels.xla.tile_plan import Plan
from flax_mha.scores import ScoreMod


class Divided(ScoreMod):
    """The operations of a call's score functions that see no vectors.

    Attributes:
      arrays: the leaves of the functions that these operations read.
      numbers: the numbers of queries and keys.
      program: the operations, on the arrays, the coordinates, the score and the numbers.
    """

    arrays: list[Any]
    numbers: list[ScoreArray]
    program: Any = struct.field(pytree_node=False)

    def __call__(self, score: jax.Array, at: At) -> jax.Array:
        """Return the new score."""
        leaves: list[Any] = jax.tree.leaves((self.arrays, self.numbers))
        given = [*leaves[: len(self.arrays)], *at, score, *leaves[len(self.arrays) :]]
        pairs = zip(given, self.program.jaxpr.invars, strict=True)
        return core.jaxpr_as_fun(self.program)(*(_shaped(x, v.aval.shape) for x, v in pairs))[0]


def _shaped(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return an array of a tile in a shape. One query or key alone has one number for the tile."""
    return x.reshape(shape) if x.size == math.prod(shape) else jnp.broadcast_to(x, shape)


def divide(
    spec: AttentionSpec, dims: Dims, plan: Plan, q: jax.Array, k: jax.Array
) -> AttentionSpec | str:
    """Return a spec whose scores see no vectors, or the reason why they cannot be divided."""
    arrays, tree = jax.tree.flatten(spec.scores, is_leaf=is_score_array)
    tiles = [_in_tile(x, plan) for x in arrays]
    bq, bk = plan.block_q, plan.block_k

    def scores(arrays: Any, at: At, s: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
        alone = spec.replace(mask=None, scores=jax.tree.unflatten(tree, arrays))
        return alone.apply(s, at, vectors=(q, k))[0]

    def avals(dtype: Any, *shapes: tuple[int, int]) -> list[Any]:
        return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]

    at = At(*avals(jnp.int32, (1, 1), (1, 1), (bq, 1), (1, bk)))
    s, *of_tile = avals(jnp.float32, (bq, bk), (bq, dims.H), (bk, dims.H))
    closed = jax.make_jaxpr(scores)(tiles, at, s, *of_tile)
    jaxpr = closed.jaxpr
    letters = ["s" if is_score_array(x) else "" for x in arrays]
    sources = _sources(jaxpr, [*letters, "", "", "i", "j", "s", "q", "k"])
    kept, needed = _needed(jaxpr, sources, (bq, bk))
    if any(map(_is_product, kept)):
        return "has no matmuls in scores, except of queries alone or keys alone"
    numbers, results = list[ScoreArray](), list[Any]()
    for side, vectors in (("q", q), ("k", k)):
        found = [x for x, letters in sources.items() if x in needed and _side(letters) == side]
        for var in found:
            if not _fits(var.aval.shape, plan.block_q if side == "q" else plan.block_k):
                shown = var.aval.str_short()
                return f"a score reads {shown} of a tile's {side}, more than numbers of each"
        own = [eqn for eqn in jaxpr.eqns if sources[eqn.outvars[0]] <= {*_LETTERS[side]}]
        program = _part(closed, eqns=own, outvars=found)
        numbers += _run(program, spec, dims, plan, side, vectors, arrays) if found else []
        results += found
    read = [var in needed for var in jaxpr.invars[: len(arrays)]]
    invars = [var for var, is_read in zip(jaxpr.invars, read, strict=False) if is_read]
    invars += [*jaxpr.invars[len(arrays) : -2], *results]
    left = [x for x, is_read in zip(arrays, read, strict=True) if is_read]
    rest = Divided(left, numbers, _part(closed, eqns=kept, invars=invars))
    return spec.replace(scores=(rest,))


def _part(closed: Any, **changes: Any) -> Any:
    """Return a part of a program, whose inputs and results have no names."""
    unnamed = closed.jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    return core.ClosedJaxpr(closed.jaxpr.replace(**changes, debug_info=unnamed), closed.consts)


# The inputs of the operations on one side alone, as letters: its vectors, and its positions.
_LETTERS = {"q": "qi", "k": "kj"}


def _sources(jaxpr: Any, inputs: Sequence[str]) -> dict[Any, set[str]]:
    """Return the inputs that each variable depends on, given a letter for each input."""
    found: dict[Any, set[str]] = {var: set() for var in jaxpr.constvars}
    found |= {var: {*letter} for var, letter in zip(jaxpr.invars, inputs, strict=True)}
    for eqn in jaxpr.eqns:
        read = set[str]().union(*(found[x] for x in _variables(eqn.invars)))
        found |= dict.fromkeys(eqn.outvars, read)
    return found


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [x for x in atoms if not isinstance(x, core.Literal)]


def _side(sources: set[str]) -> str | None:
    """Return the side that operations are on alone, `q` or `k`, or None."""
    return next((n for n, own in _LETTERS.items() if n in sources and sources <= {*own}), None)


def _needed(
    jaxpr: Any, sources: dict[Any, set[str]], tile: tuple[int, int]
) -> tuple[list[Any], set[Any]]:
    """Return the operations that the kernel runs, and the variables that they read."""
    kept, needed = list[Any](), {*_variables(jaxpr.outvars)}
    for eqn in reversed(jaxpr.eqns):
        # A number of each query that was spread over a tile is one number in the kernel too.
        is_spread = eqn.outvars[0].aval.shape == tile and eqn.primitive.name != "dot_general"
        if needed & {*eqn.outvars} and (is_spread or not _side(sources[eqn.outvars[0]])):
            kept.insert(0, eqn)
            needed |= {*_variables(eqn.invars)}
    return kept, needed


def _is_product(eqn: Any) -> bool:
    inner = open_jaxpr(eqn.params["jaxpr"])[0].eqns if eqn.primitive.name in CALLS else []
    return eqn.primitive.name == "dot_general" or any(map(_is_product, inner))


def _fits(shape: tuple[int, ...], block: int) -> bool:
    """Return True if an array has a number for each query or key of a tile, or a row of them."""
    return math.prod(shape) == block or (len(shape) == 2 and shape[0] == block)


def _in_tile(x: Any, plan: Plan) -> Any:
    """Describe an array as functions see it in a tile."""
    if is_score_array(x):
        operand = Operand.of(x, plan)
        return ScoreArray(jax.ShapeDtypeStruct(operand.shape, operand.dtype))
    return jax.ShapeDtypeStruct(jnp.shape(x), Operand.of(x, plan).dtype)


def _run(
    program: Any, spec: AttentionSpec, dims: Dims, plan: Plan, side: str, x: jax.Array,
    arrays: Sequence[Any],
) -> list[ScoreArray]:  # fmt: skip
    """Return the numbers of all queries or keys."""
    of_queries, sizes = side == "q", (plan.block_q, plan.block_k)
    count, block, length = (
        (plan.nq, sizes[0], dims.T) if of_queries else (plan.nk, sizes[1], dims.S)
    )
    R, N, H = math.prod(dims.B), dims.N, dims.H
    x = heads_first(x, count * block).astype(jnp.float32)
    x = x if spec.mask is None else finite(x)
    x = x * spec.scale if of_queries else jnp.repeat(x, dims.G, 1)
    at = spec.at(dims)
    place: Array = jnp.asarray(at.q if of_queries else jnp.swapaxes(jnp.asarray(at.k), -1, -2))
    missing = [(0, 0), (0, 0), (0, count * block - length), (0, 0)]
    place = jnp.pad(flat_batch(place, dims), missing, mode="edge")
    place = jnp.broadcast_to(place, (R, N, count * block, 1))
    given = list(map(_value, arrays, program.jaxpr.invars))

    def one(row: jax.Array, head: jax.Array, place: jax.Array, x: jax.Array) -> list[jax.Array]:
        i, j = jnp.zeros((sizes[0], 1), jnp.int32), jnp.zeros((1, sizes[1]), jnp.int32)
        q, k = (jnp.zeros((n, H)) for n in sizes)
        i, j, q, k = (place, j, x, k) if of_queries else (i, place.T, q, x)
        at = row.reshape(1, 1), head.reshape(1, 1), i, j
        found = core.jaxpr_as_fun(program)(*given, *at, jnp.zeros(sizes), q, k)
        return [y.reshape(block, -1) for y in found]

    for axes in ((None, None, 0, 0), (None, 0, 0, 0), (0, None, 0, 0)):
        one = jax.vmap(one, axes)
    parts = (R, N, count, block, -1)
    rows, heads = (jnp.asarray(x).reshape(-1) for x in (flat_batch(at.row, dims), at.head))
    found = one(rows, heads, place.reshape(parts), x.reshape(parts))
    whole = [y.reshape(*dims.B, N, count * block, -1)[..., :length, :] for y in found]
    several = QueryNumbers if of_queries else KeyNumbers
    lines = (y if of_queries else jnp.swapaxes(y, -1, -2) for y in whole)
    pairs = zip(whole, lines, strict=True)
    return [several(y) if y.shape[-1] > 1 else ScoreArray(line) for y, line in pairs]


def _value(x: Any, var: Any) -> jax.Array:
    """Return an array of a score function. Those over the scores are not read."""
    aval = var.aval
    return jnp.zeros(aval.shape, aval.dtype) if is_score_array(x) else jnp.asarray(x, aval.dtype)
