"""A call's masks and scores as functions of tiles, for any machine."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from flax_mha.base.coordinates import At, is_score_array
from flax_mha.base.shapes import Dims
from flax_mha.kernels.flex import vectors
from flax_mha.kernels.flex.function import DTYPES, Function
from flax_mha.kernels.flex.operand import Operand
from flax_mha.kernels.flex.tile import FlexCall, Machine
from flax_mha.kernels.spec import AttentionSpec
from flax_mha.kernels.tile_plan import Plan, smallest_blocks
from flax_mha.masks.base import evaluate

# The maximum entries of a function's argument, in fast memory.
WHOLE = 2**17
PRECISIONS: dict[Any, Any] = {
    None: None, "default": None, lax.Precision.DEFAULT: None,
    "highest": lax.Precision.HIGHEST, lax.Precision.HIGHEST: lax.Precision.HIGHEST,
}  # fmt: skip


def trace(
    q: jax.Array, k: jax.Array, spec: AttentionSpec, dims: Dims, machine: Machine
) -> tuple[FlexCall, list[Any], list[Any]] | str:
    """Return the functions of a call, or the reason why they cannot run in a kernel.

    The functions are in the static part of the call, with `visits` and `states` for an unknown
    mask. The arrays that they close over, and the spec's leaves, follow.
    """
    plan = _divide(spec, dims, machine)
    if plan.nq * plan.nk > machine.table:
        return (
            f"divides scores into at most {machine.table} tiles, T·S = {dims.T}·{dims.S} need more"
        )
    if spec.vectors:
        divided = vectors.divide(spec, dims, plan, q, k)
        if isinstance(divided, str):
            return divided
        spec = divided
    spec = spec.replace(sinks=None, row_ids=None, head_ids=None)
    if spec.dropout is not None:
        seed = spec.dropout.seed
        spec = spec.replace(dropout=spec.dropout.replace(seed=(seed[0], seed[1])))
    arrays, tree = jax.tree.flatten(spec)
    leaves = [Operand.of(x, plan) for x in jax.tree.leaves(spec, is_leaf=is_score_array)]
    for x, operand in zip(arrays, leaves, strict=True):
        if operand.layout == "whole" and (jnp.ndim(x) > 2 or jnp.size(x) > WHOLE):
            return (
                f"takes arguments of masks and scores of at most two axes and {WHOLE} entries, "
                f"got {jnp.shape(x)}"
            )
    blocks = [
        jax.ShapeDtypeStruct(jnp.shape(x) if y.layout == "whole" else y.shape, y.dtype)
        for x, y in zip(arrays, leaves, strict=True)
    ]
    traced = _trace_functions(jax.tree.unflatten(tree, blocks), plan, machine, leaves)
    if isinstance(traced, str):
        return traced
    (plain, first), (masked, second) = traced
    closed = [*first, *second]
    call = FlexCall(
        machine, plan, (plan.nk, plan.nq), (True, True), plain, masked, len(first),
        tuple(Operand.of(x, plan) for x in closed), tuple(leaves), tree,
        spec.mask is not None, PRECISIONS[spec.precision],
    )  # fmt: skip
    return call, closed, arrays


def _divide(spec: AttentionSpec, dims: Dims, machine: Machine) -> Plan:
    """Divide the scores into tiles as fine as the mask's blocks, if the table is small enough."""
    most = machine.blocks(dims)
    least = smallest_blocks(spec.mask, spec.piece) or most
    sizes = [min(128 * -(-n // 128), size) for n, size in zip(least, most, strict=True)]
    while sizes != [*most]:
        plan = Plan(dims, sizes[0], sizes[1])
        if math.prod(dims.B) * dims.N * plan.nq * plan.nk <= machine.table:
            return plan
        # Enlarge the tiles, because a table shared by all heads would skip fewer tiles.
        axis = min((0, 1), key=lambda n: (sizes[n] == most[n], sizes[n]))
        sizes[axis] = min(2 * sizes[axis], most[axis])
    return Plan(dims, *most)


def _trace_functions(
    tile: AttentionSpec, plan: Plan, machine: Machine, leaves: list[Operand]
) -> tuple[tuple[Function, list], tuple[Function, list]] | str:
    """Trace the scores of a tile, without and with the mask, and return the closed-over arrays."""

    def plain(tile: AttentionSpec, at: At, s: jax.Array) -> jax.Array:
        return tile.replace(mask=None).apply(s * tile.scale, at)[0]

    def masked(tile: AttentionSpec, at: At, s: jax.Array, *inside: jax.Array) -> jax.Array:
        s = s * tile.scale
        allowed = jnp.ones((1, 1), bool) if tile.mask is None else evaluate(tile.mask, at)
        for x in inside:
            allowed = allowed & x
        allowed = jnp.broadcast_to(allowed, s.shape)
        # Masked scores must not enter the score functions (see `AttentionSpec.apply`).
        s, _ = tile.replace(mask=None).apply(jnp.where(allowed, s, 0.0), at)
        return jnp.where(allowed, s, -jnp.inf)

    def aval(shape: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    scores = plan.block_q, plan.block_k
    sizes = (1, 1), (1, 1), (plan.block_q, 1), (1, plan.block_k)
    at = tile.override(At(*map(aval, sizes)))
    functions = []
    for fn, more in ((plain, []), (masked, [aval(scores, jnp.bool_)] if plan.ragged else [])):
        function, consts = Function.of(fn, tile, at, aval(scores, jnp.float32), *more)
        if any(x.dtype not in DTYPES or x.ndim > 2 or x.size > WHOLE for x in consts):
            shown = ", ".join(f"{x.dtype}{list(x.shape)}" for x in consts)
            return f"a function of the mask or the scores closes over arrays it can't load: {shown}"
        closed = [Operand.of(x, plan) for x in consts]
        if lacking := machine.missing(function, [*closed, *leaves]):
            return f"its compiler lacks an operation of a mask or a score: {lacking}"
        functions.append((function, consts))
    return functions[0], functions[1]
