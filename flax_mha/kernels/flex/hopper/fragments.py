"""Functions of scores in operations of Mosaic GPU, on the registers of a warpgroup.

A mask or score function is traced once, for one tile. In a kernel its arrays are numbers and tiles
(`Spread`), or tables that are read entry by entry (`LazyTable`). Look-ups by a tile of indices are
selections among a table's entries. Branches are selections too.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from flax_mha.kernels.flex import function as functions
from flax_mha.kernels.flex.function import Function, UnsupportedPrimitive, open_jaxpr
from flax_mha.kernels.flex.function import run as walk
from flax_mha.kernels.flex.hopper import lazy_arrays
from flax_mha.kernels.flex.hopper.composed import COMPOSED
from flax_mha.kernels.flex.hopper.lazy_arrays import LazyTable, Spread, as_spread, merge_axes
from flax_mha.kernels.flex.hopper.lookups import gather
from flax_mha.kernels.flex.operand import Operand

_NAMES = """
    abs add and atan2 clamp clz convert_element_type copy div eq erf exp exp2 ge gt
    integer_pow le log logistic lt max min mul ne neg not one_minus_square or reduce_precision
    rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign
    sqrt square stop_gradient sub xor
"""
_ELEMENTWISE = frozenset(_NAMES.split())
_DTYPES = frozenset(map(jnp.dtype, ("float32", "bfloat16", "float16", "int32", "uint32", "bool")))


def call(function: Function, *args: Any) -> Any:
    """Return a tile, or a number, for closed-over arrays and arguments: tables, tiles, numbers."""
    placed = [_place(x, v) for x, v in zip(args, function.variables, strict=True)]
    (out,) = _run(function.jaxpr, placed)
    return as_spread(out).x


def call_with_slopes(
    function: Function, args: Sequence[Any], at: int, tangents: Sequence[Any]
) -> tuple[Any, list[Any]]:
    """Return the result, and its derivatives along tangents of an argument: numbers, or tables.

    JAX differentiates the function as it was traced. In a kernel it would emit operations that
    Mosaic GPU lacks.
    """
    variables = function.variables
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]
    consts = len(function.jaxpr.constvars)

    def both(given: Any, tangent: Any) -> Any:
        def score(x: Any) -> Any:
            values = [*given[:at], x, *given[at + 1 :]]
            closed = core.ClosedJaxpr(function.jaxpr, values[:consts])
            return core.jaxpr_as_fun(closed)(*values[consts:])[0]

        return jax.jvp(score, (given[at],), (tangent,))

    traced = jax.make_jaxpr(both)(avals, avals[at])
    placed = [_place(x, v) for x, v in zip(args, variables, strict=True)]
    # Operations that do not depend on the tangent are done once for all tangents.
    rules, elementwise = _remembering_rules()
    out, slopes = None, []
    for x in tangents:
        x = x if isinstance(x, LazyTable) else x.astype(variables[at].aval.dtype)
        tangent = _place(x, variables[at])
        given = [*traced.consts, *placed, tangent]
        out, slope = (as_spread(x).x for x in walk(traced.jaxpr, given, rules, elementwise))
        slopes.append(slope)
    return out, slopes


def _remembering_rules() -> tuple[dict[str, Callable], Callable]:
    """Return the rules of operations, which remember their results for the same inputs."""
    found: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def remember(rule: Callable) -> Callable:
        def apply(eqn: Any, *inputs: Any) -> Any:
            key = (id(eqn), *map(id, inputs))
            if key not in found:
                # The inputs are kept too: the id of a freed object may be given to another.
                found[key] = rule(eqn, *inputs), inputs
            return found[key][0]

        return apply

    return {name: remember(rule) for name, rule in _RULES.items()}, remember(_elementwise)


def missing(function: Function, operands: Sequence[Operand]) -> str | None:
    """Return the name of an operation that kernels lack, or their derivatives, or None.

    `operands` are the layouts of the first arguments.
    """
    variables, tables = function.variables, _tables(function, operands)
    floats = [n for n, x in enumerate(variables) if jnp.issubdtype(x.aval.dtype, jnp.floating)]
    try:
        for at in floats:
            one, table = jnp.float32(1), tables[at]
            _try(function, tables, at, _constant(one, variables[at].aval, table) if table else one)
    except UnsupportedPrimitive as error:
        return str(error)
    return None


def tile_axes(
    function: Function, operands: Sequence[Operand], at: int, shape: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the axes of a table that tiles index, or all axes if not one look-up alone reads it.

    `at` is its number among the arguments, and `shape` its shape in the kernel. An index along
    another axis is a number, the same in the whole tile: a head's, say.
    """
    found: list[tuple[int, ...]] = []

    def entry(index: Sequence[Any]) -> Any:
        found.append(tuple(axis for axis, i in enumerate(index) if jnp.ndim(i)))
        return jnp.float32(0)

    _try(function, _tables(function, operands), at, LazyTable(shape, entry, takes_tiles=True))
    return found[0] if len(found) == 1 else tuple(range(len(shape)))


def _tables(function: Function, operands: Sequence[Operand]) -> list[Operand | None]:
    """Return the layouts of arguments that are tables of several entries, and None for others."""
    pairs = itertools.zip_longest(function.variables, operands)
    return [y if y and y.is_table and x.aval.size > 1 else None for x, y in pairs]


def _try(function: Function, tables: Sequence[Operand | None], at: int, tangent: Any) -> None:
    """Trace a function and a derivative as in a kernel, which raises if the kernel lacks either."""
    variables = function.variables

    def both(*args: Any) -> Any:
        trios = zip(args, variables, tables, strict=True)
        given = [_constant(x, var.aval, table) if table else x for x, var, table in trios]
        return call_with_slopes(function, given, at, [tangent])

    pairs = zip(variables, tables, strict=True)
    shapes = [() if x.aval.size == 1 or table else (64, 64) for x, table in pairs]
    avals = zip(shapes, variables, strict=True)
    jax.eval_shape(both, *(jax.ShapeDtypeStruct(shape, x.aval.dtype) for shape, x in avals))


def _constant(x: Any, aval: Any, operand: Operand) -> LazyTable:
    return LazyTable(aval.shape, lambda index: x, side=operand.side)


def _place(x: Any, var: Any) -> Spread | LazyTable:
    shape = var.aval.shape
    if isinstance(x, LazyTable):
        return (
            lazy_arrays.reshape_table(x, shape)
            if math.prod(shape) > 1
            else lazy_arrays.as_number(x, shape)
        )
    axes = tuple(a if n > 1 else "" for a, n in zip("qk", shape, strict=False))
    return Spread(x, axes if jnp.ndim(x) else ("",) * len(shape))


def _run(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    return walk(jaxpr, args, _RULES, _elementwise)


def _elementwise(eqn: Any, *inputs: Any) -> Any:
    """Apply an operation to each number of tiles, or to each entry of tables."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    if name not in _ELEMENTWISE and name not in COMPOSED:
        raise UnsupportedPrimitive(name)
    if out.dtype not in _DTYPES:
        raise UnsupportedPrimitive(f"{name} to {out.dtype}")

    def apply(*values: Any) -> Any:
        if name in COMPOSED:
            return COMPOSED[name](*values)
        if name == "convert_element_type" and out.dtype == jnp.bool_:
            return values[0] != 0
        if name == "select_n" and len(values) > 3:
            return functions.select_among(values[0], values[1:])
        shape = jnp.broadcast_shapes(*map(jnp.shape, values))
        values = tuple(jnp.broadcast_to(x, shape) for x in values)
        return eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))

    if any(isinstance(x, LazyTable) and math.prod(x.shape) > 1 for x in inputs):
        return LazyTable(
            out.shape, lambda index: apply(*(lazy_arrays.entry_of(x, index) for x in inputs))
        )
    spread = [as_spread(x) for x in inputs]
    return Spread(
        apply(*(x.x for x in spread)), merge_axes(name, [x.axes for x in spread], out.ndim)
    )


def _broadcast(eqn: Any, x: Any) -> Any:
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    if isinstance(x, functions.IndexColumns):
        raise UnsupportedPrimitive(eqn.primitive.name)
    if isinstance(x, LazyTable) and math.prod(x.shape) > 1:
        return LazyTable(
            shape, lambda index: lazy_arrays.entry_of(x, [index[d] for d in dims]), x.takes_tiles
        )
    axes, x = [""] * len(shape), as_spread(x)
    for d, axis in zip(dims, x.axes, strict=True):
        axes[d] = axis
    return Spread(x.x, tuple(axes))


def _reshape(eqn: Any, x: Any) -> Any:
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if isinstance(x, LazyTable) and math.prod(x.shape) > 1:
        return lazy_arrays.reshape_table(x, after)
    x = as_spread(x)
    kept = [axis for axis, n in zip(x.axes, before, strict=True) if n > 1]
    if any(x.axes) and [n for n in before if n > 1] != [n for n in after if n > 1]:
        raise UnsupportedPrimitive(eqn.primitive.name)
    if not any(x.axes):
        return Spread(x.x, ("",) * len(after))
    remaining = iter(kept)
    return Spread(x.x, tuple(next(remaining) if n > 1 else "" for n in after))


def _transpose(eqn: Any, x: Any) -> Spread:
    x = as_spread(x)
    return Spread(x.x, tuple(x.axes[d] for d in eqn.params["permutation"]))


def _slice(eqn: Any, x: Any, *starts: Any) -> Any:
    shape, to = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    begin = [as_spread(s).x for s in starts] or list(eqn.params["start_indices"])
    steps = eqn.params.get("strides") or (1,) * len(shape)
    if not isinstance(x, LazyTable):
        x = as_spread(x)
        if any(axis and n != m for axis, n, m in zip(x.axes, shape, to, strict=True)):
            raise UnsupportedPrimitive(eqn.primitive.name)
        return x

    def entry(index: Sequence[Any]) -> Any:
        first = [
            b if isinstance(b, int) else jnp.clip(b.astype(jnp.int32), 0, n - m)
            for b, n, m in zip(begin, shape, to, strict=True)
        ]
        return x.entry([b + i * s for b, i, s in zip(first, index, steps, strict=True)])

    found = LazyTable(to, entry, x.takes_tiles)
    return lazy_arrays.as_number(found, to) if math.prod(to) == 1 else found


def _branch(eqn: Any, which: Any, *args: Any) -> Any:
    index, outs = as_spread(which).x, []
    for results, var in zip(functions.run_branches(eqn, args, _run), eqn.outvars, strict=True):
        choices = [*map(as_spread, results)]
        axes = merge_axes("cond", [x.axes for x in choices], var.aval.ndim)
        outs.append(Spread(functions.select_among(index, [x.x for x in choices]), axes))
    return outs


def _custom(eqn: Any, *inputs: Any) -> Any:
    """Apply a function with a derivative of its own, which has been taken already."""
    body, consts = open_jaxpr(eqn.params["call_jaxpr"])
    return _run(body, [*consts, *inputs])


def _iota(eqn: Any) -> LazyTable:
    axis, dtype = eqn.params["dimension"], eqn.params["dtype"]
    return LazyTable(eqn.params["shape"], lambda index: jnp.asarray(index[axis]).astype(dtype))


_RULES: dict[str, Callable] = {
    "broadcast_in_dim": _broadcast, "reshape": _reshape, "squeeze": _reshape, "reshard": _reshape,
    "expand_dims": _reshape, "slice": _slice, "dynamic_slice": _slice,
    "gather": gather, "cond": _branch, "custom_jvp_call": _custom, "iota": _iota,
    "concatenate": functools.partial(functions.join_indices, functions.index_columns),
    "transpose": _transpose,
}  # fmt: skip
