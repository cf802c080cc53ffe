"""Coordinates of the scores [*B, N, T, S], arrays over the scores, and tiles."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from flax_mha.base.shapes import Dims, lead
from flax_mha.base.symbols import count_up
from flax_mha.base.trees import Struct

Array: TypeAlias = jax.Array | np.ndarray


class At(NamedTuple):
    """The coordinates of a block of scores: four integer arrays that broadcast to its shape.

    Attributes:
      row: index into the flattened batch.
      head: index of the query head.
      q: positions of the queries.
      k: positions of the keys.
    """

    row: Array
    head: Array
    q: Array
    k: Array


def numpy_of(*arrays: Any) -> Any:
    """Return NumPy if all arrays are static, else `jax.numpy`."""
    return np if all(isinstance(x, np.ndarray | np.generic) for x in arrays) else jnp


def is_user_defined(node: Any) -> bool:
    """Tell if a mask or score comes from another package, or calls a function of the user."""
    return "fn" in vars(node) or type(node).__module__.partition(".")[0] != "flax_mha"


def with_jax_arrays(node: Any) -> Any:
    """Convert NumPy arrays of a user's mask or score, so that its function can index them."""
    if not is_user_defined(node):
        return node
    return jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) and x.ndim else x, node
    )


class ScoreArray(Struct):
    """An array [*B|1, N|1, T|1, S|1] that kernels slice along with the scores."""

    array: Any


def is_score_array(x: Any) -> bool:
    """Tell if x is a `ScoreArray`."""
    return isinstance(x, ScoreArray)


def map_score_arrays(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Apply fn to the arrays of each `ScoreArray` in a tree."""
    return jax.tree.map(
        lambda x: jax.tree.map(fn, x) if is_score_array(x) else x, tree, is_leaf=is_score_array
    )


class Tiles(NamedTuple):
    """The nq × nk tiles of the scores, and the positions in each.

    Attributes:
      block_q, block_k: queries and keys per tile. The last tiles may reach beyond T and S.
      q_min, q_max: the bounds of the queries' positions, int [*B|1, 1, nq, 1], NumPy if static.
      k_min, k_max: the bounds of the keys' positions, int [*B|1, 1, 1, nk].
      heads: indices of the heads, int [1, N, 1, 1], if the tiles cover only some.
      q, k: positions of all queries, [*B|1, 1, T, 1], and keys, [*B|1, 1, 1, S], if known.
    """

    block_q: int
    block_k: int
    q_min: Array
    q_max: Array
    k_min: Array
    k_max: Array
    heads: Array | None = None
    q: Array | None = None
    k: Array | None = None

    def least(self, x: Array) -> Array:
        """Return the minimum of x [*B|1, N|1, T|1, S|1] in each tile."""
        return blocks(blocks(x, -2, self.block_q).min(-2), -1, self.block_k).min(-1)

    def greatest(self, x: Array) -> Array:
        """Return the maximum of x in each tile."""
        return blocks(blocks(x, -2, self.block_q).max(-2), -1, self.block_k).max(-1)


def blocks(x: Array, axis: int, size: int) -> Array:
    """Split an axis into (number of blocks, size), or (1, 1) if its size is 1.

    Its last entry fills the last block.
    """
    axis %= x.ndim
    length = x.shape[axis]
    if length == 1:
        size = 1
    count = -(-length // size)
    missing = count * size - length
    if missing != 0:
        x = numpy_of(x).pad(
            x, [(0, missing if i == axis else 0) for i in range(x.ndim)], mode="edge"
        )
    return x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])


def flat_batch(x: Array, dims: Dims) -> Array:
    """Flatten the batch axes of [*B|1, N, T, S], to [rows|1, N, T, S]."""
    batch = x.shape[:-3]
    if all(size == 1 for size in batch):
        return x.reshape(1, *x.shape[-3:])
    x = numpy_of(x).broadcast_to(x, (*dims.B, *x.shape[-3:]))
    return x.reshape(math.prod(dims.B), *x.shape[-3:])


def tiles_of(q_pos: Array, k_pos: Array, block_q: int, block_k: int) -> Tiles:
    """Return the tiles of positions q_pos [*B|1, 1, T, 1] and k_pos [*B|1, 1, 1, S]."""
    empty = Tiles(block_q, block_k, q_pos, q_pos, k_pos, k_pos)
    bounds = (f(x) for x in (q_pos, k_pos) for f in (empty.least, empty.greatest))
    return Tiles(block_q, block_k, *bounds)._replace(q=q_pos, k=k_pos)


def whole(dims: Dims, q_pos: Array | None = None, k_pos: Array | None = None) -> At:
    """Return the coordinates of all scores of a call, given positions [*B, T] and [*B, S] if any.

    Their shapes are [*B, 1, 1, 1], [1, N, 1, 1], [*B|1, 1, T, 1] and [*B|1, 1, 1, S].
    """
    rank = len(dims.B)
    q = count_up(dims.T) if q_pos is None else q_pos
    k = count_up(dims.S) if k_pos is None else k_pos
    return At(
        row=count_up(math.prod(dims.B)).reshape(*dims.B, 1, 1, 1),
        head=lead(np.arange(dims.N, dtype=np.int32)[:, None, None], rank + 3),
        q=lead(q, rank + 1)[..., None, :, None],
        k=lead(k, rank + 1)[..., None, None, :],
    )
