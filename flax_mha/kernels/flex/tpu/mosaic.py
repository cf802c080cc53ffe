"""Functions of scores in operations of Mosaic, Pallas' compiler for TPUs.

A mask or score function is traced once, for one tile. A kernel evaluates it with these changes:

- Arrays have two axes: one element is [1, 1], a vector [1, n].
- Look-ups in small tables, which Mosaic lacks, select among their entries, with exact gradients.
- Branches on an index become selections too.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from flax_mha.kernels.call.spec import Unsupported
from flax_mha.kernels.flex import function as functions
from flax_mha.kernels.flex.function import DTYPES, variables
from flax_mha.kernels.flex.operand import flat

# The maximum entries of a look-up table, because each entry is an unrolled selection.
ENTRIES = 256

# The primitives that libtpu compiles, for arrays of one shape or shapes that broadcast to it.
_NAMES = """
    abs add add_any and atan2 broadcast_in_dim ceil clamp clz convert_element_type copy cos
    custom_jvp_call div eq erf exp exp2 floor ge gt integer_pow iota is_finite jit le log log1p
    logistic lt max min mul ne neg not or pjit population_count pow reduce_max reduce_min
    reduce_sum rem reshard reshape round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sqrt square squeeze stop_gradient sub tan tanh xor
"""
_ALLOWED = frozenset(_NAMES.split())


def call(function: core.Jaxpr, *args: Any) -> Any:
    """Return the result for closed-over arrays and arguments, of `flat` shapes as the result."""
    (out,) = _run(function, args)
    return _broadcast(out, function.outvars[0])


@functools.lru_cache(256)  # Equal layers share a function.
def missing_operation(function: core.Jaxpr) -> str | None:
    """Return the name of an operation that Mosaic lacks, or None."""
    avals = (x.aval for x in variables(function))
    args = [jax.ShapeDtypeStruct(flat(x.shape), x.dtype) for x in avals]
    try:
        return _missing_operation(jax.make_jaxpr(lambda *x: call(function, *x))(*args).jaxpr)
    except Unsupported as error:
        return str(error)


def _missing_operation(jaxpr: Any) -> str | None:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        shapes = [x.aval.shape for x in (*eqn.invars, *eqn.outvars)]
        if name not in _ALLOWED or max(map(len, shapes)) > 2:
            return name
        if name == "reshape" and len({tuple(n for n in s if n > 1) for s in shapes}) > 1:
            return name
        for x in eqn.outvars:
            if x.aval.dtype not in DTYPES:
                return f"{name} to {x.aval.dtype}"
        for x in eqn.params.values():
            is_program = isinstance(x, core.Jaxpr | core.ClosedJaxpr)
            if is_program and (missing := _missing_operation(functions.open_jaxpr(x)[0])):
                return missing
    return None


def _run(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """Run a jaxpr. A broadcast array stays small until it is read.

    An array [..., n] of indices into a table is a list of n arrays, one for each of its axes.
    """
    return functions.run(jaxpr, args, _RULES, _bind)


def _broadcast(x: Any, var: Any) -> Any:
    """Broadcast an array to the `flat` shape of a variable. Numbers stay numbers."""
    if isinstance(x, list):
        raise Unsupported(f"arrays of {len(var.aval.shape)} axes")
    return x if jnp.ndim(x) == 0 else jnp.broadcast_to(x, flat(var.aval.shape))


def _bind(eqn: Any, *inputs: Any) -> Any:
    """Apply an operation unchanged."""
    values = [_broadcast(x, v) for x, v in zip(inputs, eqn.invars, strict=True)]
    if eqn.primitive.name == "custom_jvp_call":
        # Its derivative needs the shapes that it was traced with.
        values = [jnp.reshape(x, v.aval.shape) for x, v in zip(values, eqn.invars, strict=True)]
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    if eqn.primitive.multiple_results:
        return [jnp.reshape(x, flat(x.shape)) for x in out]
    return out


def _fill(eqn: Any, x: Any) -> Any:
    """Apply a broadcast, which keeps an array that broadcasts implicitly."""
    shape, axes = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    if len(shape) == 3 and shape[-1] == 1 and (jnp.size(x) == 1 or axes == (0, 1)):
        return [x]
    if len(shape) > 2:
        raise Unsupported(eqn.primitive.name)
    if jnp.size(x) == 1:
        return jnp.broadcast_to(x, (1, 1))
    if len(axes) == 2:
        return x
    # A vector along one of two axes.
    return jnp.reshape(x, (1, -1) if axes[0] == len(shape) - 1 else (-1, 1))


def _reshape(eqn: Any, x: Any) -> Any:
    """Apply a change of rank, or an operation without effect in a kernel."""
    return jnp.reshape(_broadcast(x, eqn.invars[0]), flat(eqn.outvars[0].aval.shape))


def _select(eqn: Any, *inputs: Any) -> Any:
    to = flat(eqn.outvars[0].aval.shape)
    return lax.select_n(*(jnp.broadcast_to(x, to) for x in inputs))


def _branch(eqn: Any, which: Any, *args: Any) -> Any:
    """Select among the results of all branches, because Mosaic's branches return no bools."""
    pairs = zip(functions.run_branches(eqn, args, _run), eqn.outvars, strict=True)
    return [
        functions.select_among(which, [_broadcast(x, var) for x in choices])
        for choices, var in pairs
    ]


def _gather(eqn: Any, table: Any, index: Any) -> Any:
    """Look up entries of a table by an index for each axis."""
    shape, to, params = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, eqn.params
    numbers, mode = params["dimension_numbers"], params["mode"]
    if sorted(numbers.start_index_map) != list(range(len(shape))) or numbers.offset_dims:
        raise Unsupported("gather")
    indices, inside = list[tuple[int, Any]](), jnp.bool_(True)
    for axis, x in zip(numbers.start_index_map, _columns(index, eqn.invars[1]), strict=True):
        clipped = mode == lax.GatherScatterMode.CLIP
        x = (jnp.clip(x, 0, shape[axis] - 1) if clipped else x).astype(jnp.int32)
        inside = inside & (x >= 0) & (x < shape[axis])
        indices.append((axis + 2 - len(shape), x))
    # Numbers first, so that fewer entries are left to select among.
    indices.sort(key=lambda pair: jnp.size(pair[1]))
    count = math.prod(shape[axis + len(shape) - 2] for axis, x in indices if jnp.size(x) > 1)
    if count > ENTRIES:
        raise Unsupported(f"gather from {count} entries, of more than {ENTRIES},")
    out = _lookup(_broadcast(table, eqn.invars[0]), indices)
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        fill = jnp.nan if params["fill_value"] is None else params["fill_value"]
        out = jnp.where(inside, out, jnp.asarray(fill, out.dtype))
    return jnp.broadcast_to(out, flat(to))


def _columns(x: Any, var: Any) -> list[Any]:
    """Return the index of each axis, from a variable's array [..., n] of indices."""
    if isinstance(x, list):
        return x
    if var.aval.shape[-1:] != (1,):
        raise Unsupported("gather")
    return [jnp.reshape(x, flat(var.aval.shape[:-1]))]


def _join(eqn: Any, *inputs: Any) -> list[Any]:
    """Join the indices of several axes."""
    if eqn.params["dimension"] != eqn.outvars[0].aval.ndim - 1:
        raise Unsupported("concatenate")
    pairs = zip(inputs, eqn.invars, strict=True)
    return [x for part, var in pairs for x in _columns(part, var)]


def _lookup(table: Any, indices: Sequence[tuple[int, Any]]) -> Any:
    """Return the entries of a table at pairs of an axis and its index."""
    if not indices:
        return table
    (axis, index), *rest = indices
    if jnp.size(index) == 1:
        return _lookup(_select_entry(table, axis, index), rest)
    entries = [_lookup(_select_entry(table, axis, n), rest) for n in range(table.shape[axis])]
    out = entries[0]
    for n, entry in enumerate(entries[1:], 1):
        out = jnp.where(index == n, entry, out)
    return out


def _select_entry(table: Any, axis: int, index: Any) -> Any:
    """Return table[index] along an axis, which is kept, as a sum with zeros for other entries."""
    entries = lax.broadcasted_iota(jnp.int32, table.shape, axis)
    one = jnp.where(entries == index, table, jnp.zeros_like(table))
    return jnp.sum(one, axis, keepdims=True, dtype=table.dtype)


def _slice(eqn: Any, x: Any, *indices: Any) -> Any:
    """Slice each axis to all entries or one."""
    shape, to = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    x, starts = _broadcast(x, eqn.invars[0]), indices or eqn.params["start_indices"]
    for axis, (size, new_size, start) in enumerate(zip(shape, to, starts, strict=True)):
        if new_size == size:
            continue
        if new_size != 1 or len(shape) > 2:
            raise Unsupported(eqn.primitive.name)
        x = _select_entry(x, axis + 2 - len(shape), jnp.clip(start, 0, size - 1))
    return jnp.reshape(x, flat(to))


def _iota(eqn: Any) -> Any:
    shape, to = eqn.params["shape"], flat(eqn.params["shape"])
    axis = eqn.params["dimension"] + len(to) - len(shape)
    return lax.broadcasted_iota(eqn.params["dtype"], to, axis)


def _sign(eqn: Any, x: Any) -> Any:
    """Take the sign by comparisons, because Mosaic's integer sign compiles only on a TPU."""
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype) if is_integer else _bind(eqn, x)


_RULES: dict[str, Callable] = {
    "broadcast_in_dim": _fill, "reshape": _reshape, "reshard": _reshape, "squeeze": _reshape,
    "select_n": _select, "sign": _sign, "cond": _branch, "gather": _gather, "slice": _slice,
    "dynamic_slice": _slice, "iota": _iota,
    "concatenate": _join,
    "clamp": lambda _, least, x, most: jnp.clip(x, least, most),
}  # fmt: skip
