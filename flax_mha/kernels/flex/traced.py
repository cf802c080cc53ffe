"""A call's masks and scores as functions of tiles, for any machine."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from flax_mha.base.coordinates import At, is_score_array
from flax_mha.base.shapes import Dims
from flax_mha.kernels.call.spec import AttentionSpec
from flax_mha.kernels.chips import tpus
from flax_mha.kernels.flex.function import DTYPES
from flax_mha.kernels.flex.function import trace as trace_function
from flax_mha.kernels.flex.operand import Operand
from flax_mha.kernels.flex.tile import LOG2E, FlexCall, Machine, SpecForm, fill
from flax_mha.kernels.xla.tile_plan import Plan, smallest_blocks, tile_states
from flax_mha.masks import EMPTY
from flax_mha.masks.algebra import TracedNumbers, evaluate
from flax_mha.masks.states import is_static

# The maximum entries of a function's argument, in fast memory.
WHOLE = 2**17


def trace(
    spec: AttentionSpec, plan: Plan, machine: Machine, device: str
) -> tuple[FlexCall, list[list[Any]], list[Any]] | str:
    """Return the static part of a call, or the reason why its functions cannot run in a kernel.

    After it come the closed-over arrays for both orders of a tile's axes, and the spec's leaves.
    """
    precision = tpus.precision(spec.precision)
    if isinstance(precision, str):
        return precision
    of_q = spec.turns and spec.turns[0]
    turn = (of_q.cos.array.shape[-1], of_q.interleaved) if of_q else (0, False)
    spec = spec.replace(sinks=None, row_ids=None, head_ids=None, turns=None)
    if spec.dropout is not None:
        seed = spec.dropout.seed
        spec = spec.replace(dropout=spec.dropout.replace(seed=(seed[0], seed[1])))
    values, tree = jax.tree.flatten(spec)
    # Python's numbers are compiled into the kernel.
    constants = tuple((type(x), x) if isinstance(x, float | int) else None for x in values)
    array_leaves = zip(jax.tree.leaves(spec, is_leaf=is_score_array), constants, strict=True)
    # Elementwise functions are the same for tiles of any size; one of 2 × 2 shows which are not.
    tile = plan if machine.whole_tiles else plan._replace(block_q=2, block_k=2)
    leaves = [Operand.of(x, tile) for x, number in array_leaves if number is None]
    arrays = [x for x, number in zip(values, constants, strict=True) if number is None]
    for x, operand in zip(arrays, leaves, strict=True):
        if operand.layout == "whole" and (jnp.ndim(x) > 2 or jnp.size(x) > WHOLE):
            return (
                f"takes arguments of masks and scores of at most two axes and {WHOLE} entries, "
                f"got {jnp.shape(x)}"
            )

    form, pure = (tree, constants), not spec.user_types()
    calls, closed = list[FlexCall](), list[list[Any]]()
    for step in (1, -1) if machine.whole_tiles else (1,):
        blocks = [
            jax.ShapeDtypeStruct(jnp.shape(x) if y.layout == "whole" else y.shape[::step], y.dtype)
            for x, y in zip(arrays, leaves, strict=True)
        ]
        traced = _trace_functions(form, pure, blocks, tile, plan.ragged, machine, leaves, step)
        if isinstance(traced, str):
            return traced
        plain, masked, consts = traced
        closed.append(consts)
        calls.append(FlexCall(
            machine, plan, device, (True, True), plain, masked,
            tuple(Operand.of(x, plan) for x in consts), tuple(leaves), form, pure,
            precision, spec.reads_lse, step < 0, turn,
        ))  # fmt: skip
    call, *swapped = calls
    return call._replace(swapped=swapped[0] if swapped else None), closed, arrays


def divide(spec: AttentionSpec, dims: Dims, machine: Machine, device: str) -> tuple[Plan, str]:
    """Divide the scores into tiles as fine as the mask's blocks, if the table is small enough.

    Returns the division, and the reason for its sizes.
    """
    choices, least = machine.blocks(dims, device), smallest_blocks(spec.mask, spec.piece)
    most = choices[0][0]
    if any(spec.blocks):
        return Plan(dims, spec.blocks.q or most[0], spec.blocks.k or most[1]), "as set"
    if least is None and len(choices) > 1:

        def cost(choice: tuple[tuple[int, int], float]) -> float:
            (block_q, block_k), of_score = choice
            states = tile_states(spec, spec.at(dims), Plan(dims, block_q, block_k))
            if not is_static(states):
                return math.inf
            return of_score * block_q * block_k * float((states > EMPTY).sum(dtype=float))

        costs = [*map(cost, choices)]
        if math.isfinite(min(costs)):
            return Plan(dims, *choices[costs.index(min(costs))][0]), "with the fewest cycles"
    least = least or most
    sizes = [min(128 * -(-n // 128), size) for n, size in zip(least, most, strict=True)]
    while sizes != [*most]:
        plan = Plan(dims, sizes[0], sizes[1])
        if math.prod(dims.B) * dims.N * plan.nq * plan.nk <= machine.table:
            break
        # Enlarge the tiles, because a table shared by all heads would skip fewer tiles.
        axis = min((0, 1), key=lambda n: (sizes[n] == most[n], sizes[n]))
        sizes[axis] = min(2 * sizes[axis], most[axis])
    why = "the default" if sizes == [*most] else "for the mask's blocks"
    return Plan(dims, sizes[0], sizes[1]), why


def _score(
    form: SpecForm, masked: bool, arrays: list[Any], at: At, s: jax.Array, *inside: jax.Array
) -> jax.Array:
    """Return the scores of a tile in base 2 from q·kᵀ, for the spec's arrays.

    They are −∞ where masked, if asked.
    """
    tile = fill(form, arrays)
    allowed: Any = None
    if masked:
        allowed = jnp.ones((1, 1), bool) if tile.mask is None else evaluate(tile.mask, at)
        for x in inside:
            allowed = allowed & x
        allowed = jnp.broadcast_to(allowed, s.shape)
    if tile.scores:
        s = s * tile.scale
        # Masked scores must not enter the score functions (see `AttentionSpec.apply`).
        s = jnp.where(allowed, s, 0.0) if masked else s
        s = tile.replace(mask=None).apply(s, at)[0] * LOG2E
    else:
        s = s * (tile.scale * LOG2E)
    if not masked:
        return s
    s = jnp.where(allowed, s, -jnp.inf)
    if isinstance(tile.mask, TracedNumbers):
        # Numbers other than 0 and 1 make scores NaN.
        s += jnp.where(tile.mask.others(), jnp.asarray(jnp.nan, s.dtype), 0)
    return s


def _trace_functions(
    form: SpecForm, pure: bool, arrays: list[Any], plan: Plan, ragged: bool, machine: Machine,
    leaves: list[Operand], step: int,
) -> tuple[core.Jaxpr, core.Jaxpr, list[Any]] | str:  # fmt: skip
    """Trace the scores of a tile, without and with the mask, and return the closed-over arrays.

    A step of −1 reverses the axes of the tile, to keys × queries.
    """

    def aval(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape[::step], dtype)

    bq, bk = plan.block_q, plan.block_k
    at = fill(form, arrays).override(At(aval(1, 1), aval(1, 1), aval(bq, 1), aval(1, bk)))
    s, inside = aval(bq, bk, dtype=jnp.float32), [aval(bq, bk, dtype=jnp.bool_)] if ragged else []
    functions, closed = list[core.Jaxpr](), list[Any]()
    for masked, more in ((False, []), (True, inside)):
        # A user's function may compute something else in the next call, so it is traced anew.
        static = (form, masked) if pure else ()
        fn = _score if pure else functools.partial(_score, form, masked)
        function, consts = trace_function(fn, *static, arrays, at, s, *more, num_static=len(static))
        if any(x.dtype not in DTYPES or x.ndim > 2 or x.size > WHOLE for x in consts):
            shown = ", ".join(f"{x.dtype}{list(x.shape)}" for x in consts)
            return f"a function of the mask or the scores closes over arrays it can't load: {shown}"
        operands = [Operand.of(x, plan) for x in consts]
        if lacking := machine.missing(function, [*operands, *leaves]):
            return f"its compiler lacks an operation of a mask or a score: {lacking}"
        functions.append(function)
        closed += consts
    return functions[0], functions[1], closed
