"""Masks in splash's form: segment ids, functions of positions, and the blocks to visit.

No array of T×S is created, except for static tables of up to `TABLE` entries.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash

from flax_mha.base.coordinates import At, flat_batch, is_score_array, map_score_arrays, tiles_of
from flax_mha.base.shapes import Dims, lead
from flax_mha.kernels.mask_parts import MaskParts, conjuncts
from flax_mha.kernels.spec import AttentionSpec
from flax_mha.kernels.splash.segment_ids import Ids, merge_ids
from flax_mha.masks import EMPTY, FULL, PARTIAL, And, Mask, PerHead, Window
from flax_mha.masks.base import evaluate
from flax_mha.masks.tiles import is_static

# The maximum entries of all heads' tables: 16 MiB, at 1 byte each.
TABLE = 2**24


class Blocks(NamedTuple):
    """The queries and keys of a block, both multiples of 128."""

    q: int
    k: int

    def padded(self, dims: Dims) -> tuple[int, int]:
        """Round T and S up to whole blocks."""
        return dims.T + -dims.T % self.q, dims.S + -dims.S % self.k


class SplashMasks(NamedTuple):
    """A mask in splash's form: segment ids, and a static mask for each group of heads.

    Attributes:
      ids: ids of queries, int32 [rows|1, T], and keys, [rows|1, S]. A query sees the keys of its
        id. None for no ids.
      heads: the query heads of each group.
      masks: for each group, one mask for all of its heads, or one for each.
    """

    ids: Ids | None
    heads: tuple[tuple[int, ...], ...]
    masks: tuple[splash.MultiHeadMask, ...]

    @property
    def by_head(self) -> bool:
        """True if heads have different masks."""
        return len({mask for group in self.masks for mask in group.masks}) > 1


class Positions(NamedTuple):
    """Static positions of queries, int32 [T], and of keys, [S]."""

    q: np.ndarray
    k: np.ndarray

    @property
    def step(self) -> int:
        """The step from one key to the next."""
        return int(self.k[1] - self.k[0]) if self.k.size > 1 else 1

    @property
    def is_even(self) -> bool:
        """True if a key's position is a linear function of its index."""
        return bool((self.k == self.k[0] + self.step * np.arange(self.k.size)).all())

    def position_of_key(self, index: Any) -> Any:
        """Return the positions of keys with these indices."""
        index = index if self.step == 1 else index * np.int32(self.step)
        return index if self.k[0] == 0 else index + np.int32(self.k[0])


@dataclasses.dataclass(frozen=True)
class ComputedMask:
    """One head's mask, computed from positions.

    Attributes:
      key: a hashable value, equal for equal rules and positions.
      head: the query head's index.
      blocks: the block sizes.
      dims: the call's sizes.
      rule: the bound mask.
      positions: the positions of queries and keys.
    """

    key: Any
    head: int
    blocks: Blocks
    dims: Dims
    rule: Mask = dataclasses.field(compare=False)
    positions: Positions = dataclasses.field(compare=False)

    def allowed(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """Return True where queries at positions q may see the keys with indices k."""
        allowed = self._at(q, self.positions.position_of_key(k)).astype(bool)
        allowed = jnp.broadcast_to(allowed, q.shape)
        return allowed & (k < self.dims.S) if self.dims.S % self.blocks.k else allowed

    def table(self) -> splash.NumpyMask:
        """Return the table of all pairs, [T, S] rounded up to whole blocks."""
        T, S = self.blocks.padded(self.dims)
        with jax.ensure_compile_time_eval():
            table = self._at(self.positions.q[:, None], self.positions.k[None])
        table = np.broadcast_to(np.asarray(table), (self.dims.T, self.dims.S))
        return splash.NumpyMask(np.pad(table, ((0, T - self.dims.T), (0, S - self.dims.S))))

    def block_states(self) -> np.ndarray:
        """Return EMPTY, PARTIAL or FULL for each block of existing pairs, [nq, nk]."""
        T, S = self.blocks.padded(self.dims)
        q, k = self.positions.q[None, None, :, None], self.positions.k[None, None, None, :]
        states: Any = self.rule.tiles(tiles_of(q, k, *self.blocks))
        states = lead(states, 4)[0, 0] if is_static(states) else np.int8(PARTIAL)
        return np.broadcast_to(states, (T // self.blocks.q, S // self.blocks.k))

    def _at(self, q: Any, k: Any) -> Any:
        row, head = np.array(0, np.int32), np.array(self.head, np.int32)
        return evaluate(_squeeze_arrays(self.rule), At(row, head, q, k))


class SplashMask(splash.Mask):
    """A computed mask with splash's interface.

    Splash reads whether any and whether all entries of a block are True, so one entry represents
    the block. With a `mask_function`, it computes the mask in all blocks that are not empty.
    """

    def __init__(self, mask: ComputedMask) -> None:
        states = mask.block_states()
        self.mask, self.is_visited = mask, states > EMPTY
        if not self.is_visited.any():
            # Splash needs at least one block. The function masks it.
            self.is_visited[0, 0] = True
        if (states < FULL).any() or mask.dims.S % mask.blocks.k:
            fill = self.shape[0] - mask.dims.T
            self.q_sequence = np.pad(mask.positions.q, (0, fill), mode="edge")
            self.mask_function = mask.allowed

    @property
    def shape(self) -> tuple[int, int]:
        """The lengths, rounded up to whole blocks."""
        return self.mask.blocks.padded(self.mask.dims)

    def __getitem__(self, block: Any) -> np.ndarray:
        i, j = (s.start // (s.stop - s.start) for s in block)
        return self.is_visited[i : i + 1, j : j + 1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SplashMask) and self.mask == other.mask

    def __hash__(self) -> int:
        return hash(self.mask)


def lower(spec: AttentionSpec, dims: Dims, blocks: Blocks) -> SplashMasks | str:
    """Return the call's mask in splash's form, or the reason why it has none."""
    parts = MaskParts.of(conjuncts(spec.mask))
    ids, masks = merge_ids(parts, spec.at(dims), dims), (*parts.band, *parts.others)
    if not masks:
        order = Positions(np.arange(dims.T, dtype=np.int32), np.arange(dims.S, dtype=np.int32))
        return _lower_static(ids, Window(), order, blocks, dims)
    for mask in masks:
        if not is_static(*jax.tree.leaves(mask)):
            return (
                f"{type(mask).__name__} holds arrays that are not NumPy's; of masks that are not "
                f"static it takes Segments, Lengths, and tables of keys or of queries alone, "
                f"joined by &"
            )
    pos = _positions(spec, dims)
    return pos if isinstance(pos, str) else _lower_static(ids, And(masks), pos, blocks, dims)


def _lower_static(
    ids: Ids | None, mask: Mask, pos: Positions, blocks: Blocks, dims: Dims
) -> SplashMasks | str:
    """Return a static mask with a group for heads with equal masks, or with a table per head."""
    mask = map_score_arrays(lambda x: flat_batch(x, dims), mask)
    rules = [_select_head(mask, head) for head in range(dims.N)]
    traits: dict[Any, _Traits] = {}
    groups: dict[Any, list[int]] = {}
    for head, rule in enumerate(rules):
        key = _hash_key(rule)
        if key not in traits:
            traits[key] = _Traits.of(rule, dims)
        groups.setdefault((key, head if traits[key].by_head else None), []).append(head)
    if any(trait.by_row for trait in traits.values()) and math.prod(dims.B) > 1:
        return "the mask differs between rows of the batch, by other rules than segment ids"
    masks = [
        ComputedMask((key, _hash_key(pos)), heads[0], blocks, dims, rules[heads[0]], pos)
        for (key, _), heads in groups.items()
    ]
    if pos.is_even and all(trait.computed for trait in traits.values()):
        computed = tuple(splash.MultiHeadMask([SplashMask(mask)]) for mask in masks)
        return SplashMasks(ids, tuple(map(tuple, groups.values())), computed)
    if len(groups) * dims.T * dims.S > TABLE:
        return (
            f"the mask is not a rule of positions alone, and its table would have more than "
            f"{TABLE} entries: T·S = {dims.T}·{dims.S}, for {len(groups)} different heads"
        )
    tables = zip((mask.table() for mask in masks), groups.values(), strict=True)
    by_head = {head: table for table, heads in tables for head in heads}
    heads = tuple(range(dims.N))
    return SplashMasks(ids, (heads,), (splash.MultiHeadMask([by_head[head] for head in heads]),))


class _Traits(NamedTuple):
    """The coordinates that one head's mask reads.

    Attributes:
      by_row: True if it differs between rows of the batch.
      by_head: True if it reads the head's index.
      computed: True if it is a rule of positions and numbers, without arrays.
    """

    by_row: bool
    by_head: bool
    computed: bool

    @classmethod
    def of(cls, rule: Mask, dims: Dims) -> "_Traits":
        """Read the traits of a mask with arrays [rows|1, 1, T|1, S|1]."""
        nodes = jax.tree.leaves(rule, is_leaf=is_score_array)
        arrays = [x.array for x in nodes if is_score_array(x)]
        if any(len(x) > 1 for x in arrays):
            return cls(True, False, False)
        number, q, k = (jax.ShapeDtypeStruct(x, np.int32) for x in ((), (dims.T, 1), (1, dims.S)))
        flat = _squeeze_arrays(rule)
        program = jax.make_jaxpr(lambda *at: evaluate(flat, At(*at)))(number, number, q, k)
        consts = [x for x in program.consts if np.ndim(x)]
        return cls(
            _reads(program.jaxpr, 0),
            _reads(program.jaxpr, 1),
            not consts and all(x.size == 1 for x in arrays),
        )


def _positions(spec: AttentionSpec, dims: Dims) -> Positions | str:
    """Return the positions, or the reason why they are not static and equal in all rows."""
    positions = []
    for name, x in zip(("q_positions", "kv_positions"), spec.at(dims)[2:], strict=True):
        if not is_static(x):
            return f"{name} are not NumPy's or a number: the mask is computed before tracing"
        x = np.asarray(flat_batch(x, dims))
        if len(x) > 1:
            return f"{name} differ between rows of the batch, and so does the mask"
        positions.append(x.reshape(-1))
    return Positions(*positions)


def _select_head(mask: Mask, head: int) -> Mask:
    """Return the mask of one head, with arrays [rows|1, 1, T|1, S|1]."""

    def choose(x: Any) -> Any:
        return _select_head(x.masks[head], head) if type(x) is PerHead else x

    mask = jax.tree.map(choose, mask, is_leaf=lambda x: type(x) is PerHead)
    return map_score_arrays(lambda x: x[:, head : head + 1] if x.shape[1] > 1 else x, mask)


def _squeeze_arrays(rule: Mask) -> Mask:
    """Return a rule with arrays of one row and head as [T|1, S|1], or as a number."""
    return map_score_arrays(lambda x: x.reshape(()) if x.size == 1 else x[0, 0], rule)


def _hash_key(tree: Any) -> Any:
    """Return a hashable value that is equal for equal trees of arrays."""
    leaves = [np.asarray(x) for x in jax.tree.leaves(tree)]
    return jax.tree.structure(tree), tuple((x.shape, x.dtype.str, x.tobytes()) for x in leaves)


def _reads(jaxpr: Any, argument: int) -> bool:
    """Return True if the outputs of a program may depend on an argument."""
    reached = {jaxpr.invars[argument]}
    for eqn in jaxpr.eqns:
        if any(x in reached for x in eqn.invars if not hasattr(x, "val")):
            reached.update(eqn.outvars)
    return any(x in reached for x in jaxpr.outvars if not hasattr(x, "val"))
