"""The division of a call into tiles, and the tiles that each block of queries visits."""

import functools
import itertools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from flax_mha.base import shapes, symbols
from flax_mha.base.coordinates import Array, At, flat_batch, tiles_of
from flax_mha.base.shapes import Dims
from flax_mha.base.trees import tree_nodes
from flax_mha.kernels.call.mask_parts import conjuncts
from flax_mha.kernels.call.spec import AttentionSpec
from flax_mha.masks import EMPTY, FULL, PARTIAL, Mask
from flax_mha.masks.states import is_static


class KeyRange(NamedTuple):
    """Consecutive blocks of queries, each of which visits adjacent tiles of keys in one matmul.

    Attributes:
      first: the first block of queries.
      starts: the first tile of keys of each block; empty with `VisitLists`.
      width: the number of tiles of keys.
      masked: True if any of the tiles needs the mask.
    """

    first: int
    starts: tuple[int, ...]
    width: int
    masked: bool

    def count_blocks(self, nq: int) -> int:
        """Return the number of blocks of queries, given the call's number nq."""
        return len(self.starts) or nq


class Plan(NamedTuple):
    """The division of a call into tiles. Static and hashable.

    Attributes:
      dims: the call's sizes.
      block_q: the queries of a tile.
      block_k: the keys of a tile.
      key_ranges: the keys that each block of queries visits, if static and adjacent; empty if
        `VisitLists` hold the tiles.
      full: with visit lists, True if there may be full tiles.
      partial: with visit lists, True if there may be partial tiles.
    """

    dims: Dims
    block_q: int
    block_k: int
    key_ranges: tuple[KeyRange, ...] = ()
    full: bool = True
    partial: bool = True

    @classmethod
    def of(cls, dims: Dims, most_q: int, most_k: int) -> "Plan":
        """Divide a call into the fewest equal blocks with at most these queries and keys."""
        return cls(dims, _equal_size(dims.T, most_q), _equal_size(dims.S, most_k))

    @property
    def parts(self) -> tuple[KeyRange, ...]:
        """The ranges of keys. With visit lists, one range of single tiles."""
        return self.key_ranges or (KeyRange(0, (), 1, True),)

    @property
    def nq(self) -> int:
        """The number of blocks of queries."""
        return -(-self.dims.T // self.block_q)

    @property
    def nk(self) -> int:
        """The number of tiles of keys for each block of queries."""
        return -(-self.dims.S // self.block_k)

    @property
    def padded(self) -> tuple[int, int]:
        """T and S, rounded up to whole blocks."""
        return self.nq * self.block_q, self.nk * self.block_k

    @property
    def ragged(self) -> bool:
        """True if the last blocks reach beyond the last query or key."""
        return self.dims.T % self.block_q != 0 or self.dims.S % self.block_k != 0

    @property
    def rows_together(self) -> int:
        """The number of rows and key/value heads to compute in one matmul."""
        R = math.prod(self.dims.B) * self.dims.K
        if not self.key_ranges or symbols.is_symbolic(R):
            return 1
        scores = self.block_q * self.block_k * max(part.width for part in self.key_ranges)
        if R * scores <= _ALL:
            return R
        return max(n for n in range(1, R + 1) if R % n == 0 and (n == 1 or n * scores <= _SOME))


class VisitLists(NamedTuple):
    """The tiles that each block of queries visits one by one, int32 [rows|1, N|1, nq, ·].

    Attributes:
      order: the tiles of keys [nk]: full ones, then partial ones, then empty ones.
      full: the number of full tiles [].
      some: the number of tiles that are not empty [].
    """

    order: Array
    full: Array
    some: Array


# Measured on two CPU cores, in the time of one score: the overhead of a matmul, the overhead of a
# visited tile (which rescales the earlier sums), and the relative cost of a masked score.
_PRODUCT = 50_000
_VISIT = 130_000
_MASKED = 1.25
# Up to _ALL scores, all rows and heads are computed together, else several with up to _SOME scores.
# Smaller matmuls leave a core idle, larger ones do not fit the cache.
_SOME, _ALL = 2**19, 2**20
# The maximum number of scores of a matmul: 8 MiB in float32.
MOST = 2**21
# A mask's blocks (`smallest_blocks`) of fewer than _SMALL queries or keys share tiles of at least
# _SHARED. Blocks of more than _LARGE are divided.
_SMALL, _SHARED, _LARGE = 16, 64, 512
# Up to this number of scores of a head, and a quarter of it for more than 1,024 keys, a traced mask
# hides too few tiles to visit them one by one, unless it is a mask of blocks. Such loops take twice
# as long to compile.
_SHORT = 1024**2
# The maximum number of key ranges, because each is compiled separately.
_KEY_RANGES = 4
# The queries and keys of a tile if lengths are symbolic.
_SYMBOLIC = (128, 512)
# The maximum number of a device's tiles of queries that a ring looks at to find empty steps.
_TILES = 16


def plan_call(spec: AttentionSpec, dims: Dims, most: int = MOST) -> tuple[Plan, VisitLists | None]:
    """Return the fastest plan with at most `most` scores in a matmul, and visit lists or None."""
    at = spec.at(dims)
    if symbols.is_symbolic(dims.T, dims.S):
        plan = Plan(dims, spec.blocks.q or _SYMBOLIC[0], spec.blocks.k or _SYMBOLIC[1])
        return plan, make_visit_lists(jnp.asarray(tile_states(spec, at, plan)))
    choices: list[tuple[float, Plan, np.ndarray]] = []
    sizes = ((512, 512), (512, 2048), (1024, 1024), (256, 256), (128, 128))
    plans = [Plan.of(dims, *most) for most in sizes]
    if any(spec.blocks):
        plans = [_with_blocks(plan, *spec.blocks) for plan in plans]
    mask_blocks, fine = smallest_blocks(spec.mask, spec.piece), None
    if mask_blocks is not None and not any(spec.blocks):
        fine = Plan(dims, _fit(mask_blocks[0], dims.T), _fit(mask_blocks[1], dims.S))
        plans.insert(0, fine)
    scores, most_short = dims.T * dims.S, _SHORT if dims.S <= 1024 else _SHORT // 4
    for plan in plans:
        states = tile_states(spec, at, plan)
        if not isinstance(states, np.ndarray):
            if plan is fine or scores > most_short:
                return plan, make_visit_lists(states)
            states = _bound_states(spec, at, plan)
            # Larger blocks take no less time here, but more memory.
            most = min(most, _SOME)
        key_ranges = _find_key_ranges(plan, states)
        cost = _cost_of_key_ranges(plan, key_ranges, most)
        choices.append((cost, plan._replace(key_ranges=key_ranges), states))
        # A small tile has less overhead than a large one.
        visit = min(_VISIT, 2 * plan.block_q * plan.block_k) if plan is fine else _VISIT
        choices.append((_cost_of_tiles(plan, states, visit), plan, states))
    _, plan, states = min(choices, key=lambda choice: choice[0])
    if plan.key_ranges:
        return plan, None
    full, partial = (bool((states == state).any()) for state in (FULL, PARTIAL))
    lists = make_visit_lists(states)
    lists = lists._replace(order=lists.order[..., : max(1, lists.some.max())])
    return plan._replace(full=full, partial=partial), lists


def _with_blocks(plan: Plan, q: int | None, k: int | None) -> Plan:
    """Return the plan with the blocks that a caller sets, at most the call's size."""
    block_q = plan.block_q if q is None else min(q, plan.dims.T)
    block_k = plan.block_k if k is None else min(k, plan.dims.S)
    return plan._replace(block_q=block_q, block_k=block_k)


def _equal_size(length: int, most: int) -> int:
    """Return the size of the fewest equal blocks with at most `most` entries."""
    return -(-length // -(-length // most))


def smallest_blocks(mask: Mask | None, piece: int | None = None) -> tuple[int, int] | None:
    """Return the smallest blocks of a mask and its parts, no larger than a piece, or None."""
    shapes = [x.block_shape() for x in tree_nodes(mask) if isinstance(x, Mask)]
    shapes += [(piece, piece)] if shapes and piece else []
    blocks = [shape for shape in shapes if shape is not None]
    return (min(q for q, _ in blocks), min(k for _, k in blocks)) if blocks else None


def _fit(block: int, length: int) -> int:
    """Return the size of tiles that hold several blocks, or an equal part of one."""
    size = block if block >= _SMALL else block * -(-_SHARED // block)
    return min(_equal_size(size, _LARGE), length)


def tile_states(spec: AttentionSpec, at: At, plan: Plan) -> Array:
    """Return the state of each tile, int8 [rows|1, N|1, nq, nk]: EMPTY, PARTIAL or FULL."""
    table = (1, 1, plan.nq, plan.nk)
    if spec.mask is None:
        xp = jnp if symbols.is_symbolic(*table) else np
        states: Array = xp.full(table, FULL, np.int8)
    else:
        tiles = tiles_of(at.q, at.k, plan.block_q, plan.block_k)
        if spec.head_ids is not None:
            tiles = tiles._replace(heads=spec.head_ids.array)
        states = spec.mask.tiles(tiles)
        shape = jnp.broadcast_shapes(states.shape, table)
        xp = np if is_static(states) and not symbols.is_symbolic(*shape) else jnp
        states = xp.broadcast_to(states, shape)
        states = flat_batch(states, plan.dims)
    if plan.dims.S % plan.block_k != 0:
        # The last tile reaches beyond the last key, so it needs the mask.
        last = shapes.lead(symbols.count_up(plan.nk) == plan.nk - 1, 4) & (states == FULL)
        states = (np if is_static(states) else jnp).where(last, np.int8(PARTIAL), states)
    return states


def _bound_states(spec: AttentionSpec, at: At, plan: Plan) -> np.ndarray:
    """Return EMPTY for tiles that static parts of a traced mask hide, PARTIAL for the others."""
    parts = (tile_states(spec.replace(mask=mask), at, plan) for mask in conjuncts(spec.mask))
    bound = np.full((1, 1, plan.nq, plan.nk), PARTIAL, np.int8)
    return functools.reduce(np.minimum, filter(is_static, parts), bound)


def visible_tiles(spec: AttentionSpec, dims: Dims, n: int) -> Array:
    """Return True for tiles in which any row or head can see a key, bool [n·tiles, n·tiles].

    Each of n devices has up to `_TILES` tiles of queries, and of keys, because in an order such as
    `sharding.balanced` it has several pieces.
    """
    block_q, block_k = (size // n // math.gcd(size // n, _TILES) for size in (dims.T, dims.S))
    states = tile_states(spec, spec.at(dims), Plan(dims, block_q, block_k))
    return (states > EMPTY).any((0, 1))


def make_visit_lists(states: Array) -> VisitLists:
    """Return the visit lists for tile states [rows|1, N|1, nq, nk]."""
    xp = np if is_static(states) else jnp
    order = xp.argsort(-states.astype(np.int32), axis=-1, stable=True)
    tables = (order, (states == FULL).sum(-1), (states > EMPTY).sum(-1))
    return VisitLists(*(x.astype(np.int32) for x in tables))


def _find_key_ranges(plan: Plan, states: np.ndarray) -> tuple[KeyRange, ...]:
    """Return each block's keys from the first to the last visible one, over all rows and heads."""
    visible = states.max((0, 1)) > EMPTY
    first = np.where(visible.any(-1), visible.argmax(-1), 0)
    last = np.where(visible.any(-1), plan.nk - visible[:, ::-1].argmax(-1), 1)
    runs = [(int(width), len(list(blocks))) for width, blocks in itertools.groupby(last - first)]
    while len(runs) > _KEY_RANGES:
        # Join the neighbours that add the fewest scores.
        pairs = list(itertools.pairwise(runs))
        added = [abs(a[0] - b[0]) * (a if a[0] < b[0] else b)[1] for a, b in pairs]
        i = int(np.argmin(added))
        a, b = pairs[i]
        runs[i : i + 2] = [(max(a[0], b[0]), a[1] + b[1])]
    full = states.min((0, 1)) == FULL
    key_ranges, block = [], 0
    for width, count in runs:
        starts = np.minimum(first[block : block + count], plan.nk - width)
        visited = full[np.arange(block, block + count)[:, None], starts[:, None] + np.arange(width)]
        key_ranges.append(KeyRange(block, tuple(starts.tolist()), width, not visited.all()))
        block += count
    return tuple(key_ranges)


def _cost_of_key_ranges(plan: Plan, key_ranges: tuple[KeyRange, ...], most: int) -> float:
    cost = 0.0
    for part in key_ranges:
        scores = plan.block_q * plan.block_k * part.width
        if scores > most:
            return np.inf
        cost += len(part.starts) * (scores * (_MASKED if part.masked else 1) + _PRODUCT)
    return cost


def _cost_of_tiles(plan: Plan, states: np.ndarray, visit: int) -> float:
    full, partial = ((states == state).mean() * plan.nq * plan.nk for state in (FULL, PARTIAL))
    scores = plan.block_q * plan.block_k * (full + partial * _MASKED)
    return scores + (full + partial) * visit
