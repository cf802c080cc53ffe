"""Masks in splash's form: segment ids, and one static mask for all rows and heads.

No array of T×S is created.
"""

import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask

from flax_mha.base.coordinates import At, flat_batch, map_score_arrays, whole
from flax_mha.base.shapes import Dims
from flax_mha.kernels.call.mask_parts import MaskParts, conjuncts
from flax_mha.kernels.call.spec import AttentionSpec
from flax_mha.kernels.xla.tile_plan import Plan, tile_states
from flax_mha.masks import EMPTY, FULL, PARTIAL, And, Dense, Lengths, Mask, Segments, Window
from flax_mha.masks.algebra import evaluate
from flax_mha.masks.states import is_static

# Ids of queries, int32 [rows|1, T], and of keys, [rows|1, S]. A query sees the keys with its id.
Ids: TypeAlias = tuple[jax.Array, jax.Array]
# The masks that may be traced, and differ between rows of the batch.
_IDS = "Segments, Lengths, or a table of keys, joined by &"


class ComputedMask(splash_attention_mask.Mask):
    """A mask in splash's form, computed from positions in all blocks that are not empty.

    Splash reads whether any and whether all entries of a block are True, so one entry represents
    the block.
    """

    def __init__(self, mask: Mask, at: At, plan: Plan, spec: AttentionSpec) -> None:
        """Take a static mask of positions alone, where the keys' positions count up."""
        self._rule = _with_numbers(mask)
        self._first = at.k.reshape(-1)[0]
        leaves, tree = jax.tree.flatten((mask, at))
        leaves = [np.asarray(x) for x in leaves]
        # Splash computes its tables once for equal masks, which may be of several layers.
        self._plan = plan
        self._key = plan, tree, *((x.shape, x.dtype, x.tobytes()) for x in leaves)
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
        return isinstance(other, ComputedMask) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def lower(spec: AttentionSpec, plan: Plan) -> tuple[Ids | None, ComputedMask] | str:
    """Return the call's mask as segment ids and a static mask, or the reason why it has none."""
    dims, at = plan.dims, spec.at(plan.dims)
    parts = MaskParts.of(conjuncts(spec.mask))
    sources = parts.segments + parts.lengths + parts.keys
    if len(sources) > 1:
        names = ", ".join(type(mask).__name__ for mask in sources)
        return f"takes segment ids from one mask, got {names}"
    ids = _ids(sources[0], at, dims) if sources else None
    masks = (*parts.band, *parts.queries, *parts.others)
    if not masks:
        # Only the ids read the positions, which may be traced.
        masks, at = (Window(),), whole(dims)
    masks = tuple(map_score_arrays(lambda x: flat_batch(x, dims), mask) for mask in masks)
    if reason := next(filter(None, (_check(mask, dims) for mask in masks)), None):
        return reason
    for label, x in (("q_positions", at.q), ("kv_positions", at.k)):
        if not is_static(x):
            return f"{label} are not NumPy's or a number: the mask is computed before tracing"
        if len(flat_batch(x, dims)) > 1:
            return f"{label} differ between rows of the batch, and so does the mask"
    if (np.diff(at.k) != 1).any():
        return "kv_positions do not count up by 1"
    zero = np.zeros((1, 1, 1, 1), np.int32)
    at = At(zero, zero, flat_batch(at.q, dims), flat_batch(at.k, dims))
    return ids, ComputedMask(And(masks), at, plan, spec)


def _ids(mask: Segments | Lengths | Dense, at: At, dims: Dims) -> Ids:
    """Return ids that are equal where segments, lengths, or a table of keys, allow."""
    if isinstance(mask, Segments):
        q, k = mask.q.array, mask.kv.array
    elif isinstance(mask, Dense):
        q, k = jnp.ones_like(at.q), jnp.where(mask.array.array, 1, 2)
    else:
        q = jnp.ones_like(at.q) if mask.q is None else jnp.where(at.q < mask.q.array, 1, 0)
        k = jnp.where(at.k < mask.kv.array, 1, 2)
    q, k = (jnp.asarray(flat_batch(x, dims), jnp.int32)[:, 0] for x in (q, k))
    return (
        jnp.broadcast_to(q[:, :, 0], (len(q), dims.T)),
        jnp.broadcast_to(k[:, 0], (len(k), dims.S)),
    )


def _check(mask: Mask, dims: Dims) -> str | None:
    """Return the reason why a mask is no rule of positions for all rows and heads, or None."""
    name = type(mask).__name__
    if not is_static(*jax.tree.leaves(mask)):
        return f"{name} holds arrays that are not NumPy's; only {_IDS}, may"
    rule, at = _with_numbers(mask), whole(dims._replace(B=(math.prod(dims.B),)))
    closed, result = jax.make_jaxpr(lambda *at: evaluate(rule, At(*at)), return_shape=True)(*at)
    # What it reads, because on a mesh a device may have one row or head of several.
    read = [x for eqn in closed.eqns for x in eqn.invars] + closed.jaxpr.outvars
    if result.shape[:2] != (1, 1) or any(x is i for x in read for i in closed.jaxpr.invars[:2]):
        return f"takes one mask for all rows and heads, got {name}; only {_IDS}, may differ"
    if any(map(np.ndim, closed.consts)):
        return f"{name} holds arrays, which the kernel can't load"
    return None


def _with_numbers(mask: Mask) -> Mask:
    """Return a mask with numbers in place of arrays of one entry, which a kernel can't load."""
    return map_score_arrays(lambda x: x.reshape(()) if x.size == 1 else x, mask)
