"""Masks in splash's form: segment ids, and one static mask for all rows and heads.

No array of T×S is created, except for a static table of up to `TABLE` entries.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash

from flax_mha.base.coordinates import At, flat_batch, map_score_arrays, whole
from flax_mha.base.shapes import Dims
from flax_mha.base.trees import Static
from flax_mha.kernels.call.mask_parts import MaskParts, conjuncts
from flax_mha.kernels.call.spec import AttentionSpec
from flax_mha.kernels.splash.segment_ids import Ids, merge_ids
from flax_mha.kernels.xla.tile_plan import Plan, tile_states
from flax_mha.masks import EMPTY, FULL, PARTIAL, And, Mask, Window
from flax_mha.masks.algebra import evaluate
from flax_mha.masks.states import is_static

# The maximum entries of a table: 16 MiB, at 1 byte each.
TABLE = 2**24
# The masks that may be traced, and differ between rows of the batch.
_IDS = "Segments, Lengths, and tables of keys or of queries alone, joined by &"


class ComputedMask(splash.Mask):
    """A mask in splash's form, computed from positions in all blocks that are not empty.

    Splash reads whether any and whether all entries of a block are True, so one entry represents
    the block.
    """

    def __init__(self, mask: Mask, at: At, plan: Plan, spec: AttentionSpec) -> None:
        """Take a static mask of positions alone, where the keys' positions count up."""
        self._rule = _with_numbers(mask)
        self._first = at.k.reshape(-1)[0]
        self._plan, self._key = plan, Static((mask, at))
        found = tile_states(spec.replace(mask=mask, head_ids=None), at, plan)
        states = np.full((plan.nq, plan.nk), PARTIAL, np.int8)
        if isinstance(found, np.ndarray):
            states = found[0, 0]
        self.is_visited = states > EMPTY
        if not self.is_visited.any():
            # Splash needs at least one block. The function masks it.
            self.is_visited[0, 0] = True
        if (states < FULL).any():
            fill = self.shape[0] - plan.dims.T
            self.q_sequence = np.pad(at.q.reshape(-1), (0, fill), mode="edge")
            self.mask_function = self._allowed

    def _allowed(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """Return True where queries at positions q may see the keys with indices k."""
        zero = np.array(0, np.int32)
        allowed = evaluate(self._rule, At(zero, zero, q, k + self._first if self._first else k))
        allowed = jnp.broadcast_to(allowed, q.shape)
        dims = self._plan.dims
        return allowed & (k < dims.S) if dims.S % self._plan.block_k else allowed

    @property
    def shape(self) -> tuple[int, int]:
        """The lengths, rounded up to whole blocks."""
        return self._plan.padded

    def __getitem__(self, block: Any) -> np.ndarray:
        i, j = (s.start // (s.stop - s.start) for s in block)
        return self.is_visited[i : i + 1, j : j + 1]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ComputedMask):
            return False
        return (self._plan, self._key) == (other._plan, other._key)

    def __hash__(self) -> int:
        return hash((self._plan, self._key))


def lower(spec: AttentionSpec, plan: Plan) -> tuple[Ids | None, splash.Mask] | str:
    """Return the call's mask as segment ids and a static mask, or the reason why it has none."""
    dims, at = plan.dims, spec.at(plan.dims)
    parts = MaskParts.of(conjuncts(spec.mask))
    ids, masks = merge_ids(parts, at, dims), (*parts.band, *parts.others)
    if not masks:
        # Only the ids read the positions, which may be traced.
        masks, at = (Window(),), whole(dims)
    masks = tuple(map_score_arrays(lambda x: flat_batch(x, dims), mask) for mask in masks)
    is_rule = True
    for mask in masks:
        name = type(mask).__name__
        if not is_static(*jax.tree.leaves(mask)):
            return f"{name} holds arrays that are not NumPy's; only {_IDS}, may"
        is_same, is_computed = _traits(mask, dims)
        if not is_same:
            return (
                f"takes one mask for all rows and heads, got {name}: only {_IDS}, may differ "
                f"between rows"
            )
        is_rule &= is_computed
    for label, x in (("q_positions", at.q), ("kv_positions", at.k)):
        if not is_static(x):
            return f"{label} are not NumPy's or a number: the mask is computed before tracing"
        if len(flat_batch(x, dims)) > 1:
            return f"{label} differ between rows of the batch, and so does the mask"
    zero = np.zeros((1, 1, 1, 1), np.int32)
    at = At(zero, zero, flat_batch(at.q, dims), flat_batch(at.k, dims))
    if is_rule and (at.k == at.k[..., :1] + np.arange(dims.S)).all():
        return ids, ComputedMask(And(masks), at, plan, spec)
    if dims.T * dims.S > TABLE:
        return (
            f"the mask is not a rule of positions that count up, and its table would have more "
            f"than {TABLE} entries: T·S = {dims.T}·{dims.S}"
        )
    with jax.ensure_compile_time_eval():
        table = np.broadcast_to(np.asarray(evaluate(And(masks), at)), (1, 1, dims.T, dims.S))
    T, S = plan.padded
    return ids, splash.NumpyMask(np.pad(table[0, 0], ((0, T - dims.T), (0, S - dims.S))))


def _traits(mask: Mask, dims: Dims) -> tuple[bool, bool]:
    """Return True if a mask is one for all rows and heads, and True if it needs no arrays."""
    rule, at = _with_numbers(mask), whole(dims._replace(B=(math.prod(dims.B),)))
    closed, result = jax.make_jaxpr(lambda *at: evaluate(rule, At(*at)), return_shape=True)(*at)
    # What it reads, because on a mesh a device may have one row or head of several.
    read = [x for eqn in closed.eqns for x in eqn.invars] + closed.jaxpr.outvars
    is_read = any(x is index for x in read for index in closed.jaxpr.invars[:2])
    return not is_read and result.shape[:2] == (1, 1), not any(map(np.ndim, closed.consts))


def _with_numbers(mask: Mask) -> Mask:
    """Return a mask with numbers in place of arrays of one entry, which a kernel can't load."""
    return map_score_arrays(lambda x: x.reshape(()) if x.size == 1 else x, mask)
