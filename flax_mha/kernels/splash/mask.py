"""Masks in splash's terms: segment ids, a function of positions, and which blocks are seen.

Nothing of size T×S is made, but for tables known before tracing, up to `TABLE` entries.
"""

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
from flax_mha.masks import EMPTY, PARTIAL, And, Mask, PerHead
from flax_mha.masks.tiles import is_static

# Entries of the tables of all heads: 16 MiB, as 1 byte each.
TABLE = 2**24


class Blocks(NamedTuple):
    """Queries and keys of a block, both multiples of 128."""

    q: int
    k: int

    def padded(self, dims: Dims) -> tuple[int, int]:
        """T and S, rounded up to whole blocks."""
        return dims.T + -dims.T % self.q, dims.S + -dims.S % self.k


class Lowered(NamedTuple):
    """A mask as splash takes it: a pair is allowed where all three say so.

    Attributes:
      ids: of the queries, int32 [rows|1, T], and of the keys, [rows|1, S]; equal ids may attend.
        None for no such rule.
      heads: the query heads of each group that shares what is known before tracing.
      masks: for each group, what is known: one for all of its heads, or one for each.
    """

    ids: Ids | None
    heads: tuple[tuple[int, ...], ...]
    masks: tuple[splash.MultiHeadMask, ...]

    @property
    def by_head(self) -> bool:
        """Whether heads differ."""
        return len({mask for group in self.masks for mask in group.masks}) > 1


class Lazy(splash.Mask):
    """One head's mask: never a table, splash computes it from positions in each block.

    Attributes:
      q_sequence: positions of the queries, int32 [T rounded up to whole blocks].
      mask_function: whether a query at these positions may see the keys of these indices. Both
        are absent where every query sees every key.
    """

    def __init__(
        self, rule: Mask | None, head: int, pos: "Positions", blocks: Blocks, dims: Dims, key: Any
    ) -> None:
        self._shape = blocks.padded(dims)
        # What tells one such mask from another, to hash and compare.
        self._key = (key, head, pos.key, blocks, dims)
        self._seen = _seen(rule, pos, blocks, dims)
        if rule is None and dims.S % blocks.k == 0:
            return
        self.q_sequence = np.pad(pos.q, (0, self._shape[0] - dims.T), mode="edge")
        flat = None if rule is None else _flat(rule)

        def allowed(q: jax.Array, k: jax.Array) -> jax.Array:
            real = k < dims.S
            if flat is None:
                return real
            seen = flat.allowed(
                At(np.array(0, np.int32), np.array(head, np.int32), q, pos.of_key(k))
            ).astype(bool)
            seen = jnp.broadcast_to(seen, q.shape)
            return seen & real if dims.S % blocks.k else seen

        self.mask_function = allowed

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths, rounded up to whole blocks."""
        return self._shape

    def __getitem__(self, slices: Any) -> np.ndarray:
        """One entry that stands for a whole block: whether any query sees any key of it.

        Splash asks only whether a block holds any and only True. It computes a block of a mask
        that has a `mask_function` in either case.
        """
        i, j = (s.start // (s.stop - s.start) for s in slices)
        return self._seen[i : i + 1, j : j + 1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lazy) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class Positions(NamedTuple):
    """Positions known before tracing: of queries, int32 [T], and of keys, [S]."""

    q: np.ndarray
    k: np.ndarray

    @property
    def key(self) -> Any:
        """What tells these from others."""
        return self.q.tobytes(), self.k.tobytes()

    @property
    def step(self) -> int:
        """From one key to the next."""
        return int(self.k[1] - self.k[0]) if self.k.size > 1 else 1

    @property
    def even(self) -> bool:
        """Whether a key's position follows from its index."""
        return bool((self.k == self.k[0] + self.step * np.arange(self.k.size)).all())

    def of_key(self, index: Any) -> Any:
        """The positions of keys, from their indices."""
        index = index if self.step == 1 else index * np.int32(self.step)
        return index if self.k[0] == 0 else index + np.int32(self.k[0])


def lower(spec: AttentionSpec, dims: Dims, blocks: Blocks) -> Lowered | str:
    """The call's mask as splash takes it, or the reason why it can't be."""
    parts = MaskParts.of(conjuncts(spec.mask))
    ids, masks = merge_ids(parts, spec.at(dims), dims), (*parts.band, *parts.others)
    if not masks:
        index = Positions(np.arange(dims.T, dtype=np.int32), np.arange(dims.S, dtype=np.int32))
        lazy = Lazy(None, 0, index, blocks, dims, None)
        return Lowered(ids, (tuple(range(dims.N)),), (splash.MultiHeadMask([lazy]),))
    for mask in masks:
        if not is_static(*jax.tree.leaves(mask)):
            return (
                f"{type(mask).__name__} holds arrays that are not NumPy's; of masks that are not "
                f"known before tracing it takes Segments, Lengths, and tables of keys or of "
                f"queries alone, joined by &"
            )
    pos = _positions(spec, dims)
    return pos if isinstance(pos, str) else _static(ids, And(masks), pos, blocks, dims)


def _static(
    ids: Any, mask: Mask, pos: Positions, blocks: Blocks, dims: Dims
) -> Lowered | str:  # fmt: skip
    """A mask known before tracing: heads with equal masks in one group, or a table for each."""
    mask = map_score_arrays(lambda x: flat_batch(x, dims), mask)
    rules = [_of_head(mask, head) for head in range(dims.N)]
    traits: dict[Any, _Traits] = {}
    groups: dict[Any, list[int]] = {}
    for head, rule in enumerate(rules):
        key = _key(rule)
        if key not in traits:
            traits[key] = _Traits.of(rule, dims)
        groups.setdefault((key, head if traits[key].by_head else None), []).append(head)
    if any(trait.by_row for trait in traits.values()) and math.prod(dims.B) > 1:
        return "the mask differs between rows of the batch, by other rules than segment ids"
    if pos.even and all(trait.computed for trait in traits.values()):
        lazy = [
            splash.MultiHeadMask([Lazy(rules[heads[0]], heads[0], pos, blocks, dims, key)])
            for (key, _), heads in groups.items()
        ]
        return Lowered(ids, tuple(map(tuple, groups.values())), tuple(lazy))
    if len(groups) * dims.T * dims.S > TABLE:
        return (
            f"the mask is no rule of positions alone, and its table would have more than {TABLE} "
            f"entries: T·S = {dims.T}·{dims.S}, for {len(groups)} different heads"
        )
    tables: list[splash.Mask] = [splash.NumpyMask(np.zeros((1, 1), bool))] * dims.N
    for heads in groups.values():
        table = _table(rules[heads[0]], heads[0], pos, blocks, dims)
        for head in heads:
            tables[head] = table
    return Lowered(ids, (tuple(range(dims.N)),), (splash.MultiHeadMask(tables),))


class _Traits(NamedTuple):
    """What a mask of one head reads.

    Attributes:
      by_row: whether it differs between rows of the batch.
      by_head: whether it asks which head it is for.
      computed: whether it is a rule of positions and numbers, without arrays.
    """

    by_row: bool
    by_head: bool
    computed: bool

    @classmethod
    def of(cls, rule: Mask, dims: Dims) -> "_Traits":
        """Those of a mask whose grids are [rows|1, 1, T|1, S|1]."""
        grids = [
            x.array for x in jax.tree.leaves(rule, is_leaf=is_score_array) if is_score_array(x)
        ]
        if any(len(x) > 1 for x in grids):
            return cls(True, False, False)
        number, q, k = (jax.ShapeDtypeStruct(x, np.int32) for x in ((), (dims.T, 1), (1, dims.S)))
        flat = _flat(rule)
        program = jax.make_jaxpr(lambda *at: flat.allowed(At(*at)))(number, number, q, k)
        consts = [x for x in program.consts if np.ndim(x)]
        return cls(
            _reads(program.jaxpr, 0),
            _reads(program.jaxpr, 1),
            not consts and all(x.size == 1 for x in grids),
        )


def _positions(spec: AttentionSpec, dims: Dims) -> Positions | str:
    """The positions, or the reason why a mask known before tracing can't be asked about them."""
    found = []
    for name, x in zip(("q_positions", "kv_positions"), spec.at(dims)[2:], strict=True):
        if not is_static(x):
            return f"{name} are not NumPy's or a number: the mask is computed before tracing"
        x = np.asarray(flat_batch(x, dims))
        if len(x) > 1:
            return f"{name} differ between rows of the batch, and so does what the mask allows"
        found.append(x.reshape(-1))
    return Positions(*found)


def _of_head(mask: Mask, head: int) -> Mask:
    """The mask of one head, with grids [rows|1, 1, T|1, S|1]."""

    def choose(x: Any) -> Any:
        return _of_head(x.masks[head], head) if type(x) is PerHead else x

    mask = jax.tree.map(choose, mask, is_leaf=lambda x: type(x) is PerHead)
    return map_score_arrays(lambda x: x[:, head : head + 1] if x.shape[1] > 1 else x, mask)


def _flat(rule: Mask) -> Mask:
    """Grids of one row and head as [T|1, S|1], or as a number."""
    return map_score_arrays(lambda x: x.reshape(()) if x.size == 1 else x[0, 0], rule)


def _seen(rule: Mask | None, pos: Positions, blocks: Blocks, dims: Dims) -> np.ndarray:
    """Whether any pair of each block may attend, bool [nq, nk]."""
    T, S = blocks.padded(dims)
    verdict: Any = np.int8(PARTIAL)
    if rule is not None:
        q, k = pos.q[None, None, :, None], pos.k[None, None, None, :]
        verdict = rule.tiles(tiles_of(q, k, *blocks))
    verdict = lead(verdict, 4) if is_static(verdict) else np.full((1, 1, 1, 1), PARTIAL)
    seen = np.broadcast_to(verdict[0, 0] != EMPTY, (T // blocks.q, S // blocks.k)).copy()
    # Splash can't run on no block at all; this one is masked by the function.
    seen[0, 0] |= not seen.any()
    return seen


def _table(
    rule: Mask, head: int, pos: Positions, blocks: Blocks, dims: Dims
) -> splash.NumpyMask:  # fmt: skip
    """The mask of one head, [T, S] rounded up to whole blocks."""
    with jax.ensure_compile_time_eval():
        at = At(
            np.array(0, np.int32),
            np.array(head, np.int32),
            pos.q[:, None],
            pos.k[None],
        )
        table = np.asarray(_flat(rule).allowed(at))
    T, S = blocks.padded(dims)
    table = np.broadcast_to(table, (dims.T, dims.S))
    return splash.NumpyMask(np.pad(table, ((0, T - dims.T), (0, S - dims.S))))


def _key(rule: Mask) -> Any:
    """What tells a mask from others: hashable, equal for equal masks."""
    leaves = [np.asarray(x) for x in jax.tree.leaves(rule)]
    return jax.tree.structure(rule), tuple((x.shape, x.dtype.str, x.tobytes()) for x in leaves)


def _reads(jaxpr: Any, argument: int) -> bool:
    """Whether what a program gives may depend on an argument."""
    reached = {jaxpr.invars[argument]}
    for eqn in jaxpr.eqns:
        if any(x in reached for x in eqn.invars if not hasattr(x, "val")):
            reached.update(eqn.outvars)
    return any(x in reached for x in jaxpr.outvars if not hasattr(x, "val"))
