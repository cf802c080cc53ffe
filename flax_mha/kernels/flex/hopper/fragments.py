"""Functions of scores in operations of Mosaic GPU, on the registers of a warpgroup.

A mask or score function is traced once, for one tile. In a kernel each of its arrays is one of

- `Spread`: a number, or a tile of numbers over queries and keys, though it vary along one only;
- `Table`: any other array, which is read entry by entry at computed indices, and never as a whole.

Look-ups by a tile of indices are selections among a table's entries. Branches are selections too.
Operations whose fast approximation loses digits are composed of others.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flax_mha.kernels.flex.function import Function, UnsupportedPrimitive, open_jaxpr
from flax_mha.kernels.flex.function import run as walk

# The maximum entries of a look-up by a tile of indices, because each is an unrolled selection.
ENTRIES = 256

_NAMES = """
    abs add add_any and atan2 clamp clz convert_element_type copy div eq erf exp exp2 ge gt
    integer_pow le log logistic lt max min mul ne neg not or reduce_precision rem round rsqrt
    select_n shift_left shift_right_arithmetic shift_right_logical sign sqrt square stop_gradient
    sub xor
"""
_ELEMENTWISE = frozenset(_NAMES.split())
_DTYPES = frozenset(map(jnp.dtype, ("float32", "bfloat16", "float16", "int32", "uint32", "bool")))


class Spread(NamedTuple):
    """A number, or a tile that stands for an array.

    Attributes:
      x: the number [] or the tile.
      axes: for each axis of the array, `q` or `k` if it varies along it, or an empty string.
    """

    x: Any
    axes: tuple[str, ...]


class Table(NamedTuple):
    """An array whose entries are computed or loaded one by one.

    Attributes:
      shape: the shape.
      entry: the entry at an index, a sequence of numbers.
    """

    shape: tuple[int, ...]
    entry: Callable[[Sequence[Any]], Any]


class _Index(NamedTuple):
    """An array [..., n] of indices into a table, as one array for each of its axes."""

    columns: list[Any]


def call(function: Function, *args: Any) -> Any:
    """Return a tile, or a number, for closed-over arrays and arguments: tables, tiles, numbers."""
    variables = (*function.jaxpr.constvars, *function.jaxpr.invars)
    (out,) = _run(function.jaxpr, [_place(x, v) for x, v in zip(args, variables, strict=True)])
    return _spread(out).x


def missing(function: Function) -> str | None:
    """Return the name of an operation that kernels lack, or None."""
    jaxpr, tile = function.jaxpr, (64, 64)

    def trial(*args: Any) -> Any:
        return call(function, *map(_trial_argument, args, (*jaxpr.constvars, *jaxpr.invars)))

    def shape(aval: Any) -> tuple[int, ...]:
        return () if aval.size == 1 or not _is_tile(aval.shape) else tile

    variables = [x.aval for x in (*jaxpr.constvars, *jaxpr.invars)]
    try:
        jax.eval_shape(trial, *(jax.ShapeDtypeStruct(shape(x), x.dtype) for x in variables))
    except UnsupportedPrimitive as error:
        return str(error)
    return None


def _is_tile(shape: Sequence[int]) -> bool:
    """Return True for the shapes of arrays over the scores, whose tiles are multiples of 128."""
    return len(shape) == 2 and all(n == 1 or n % 128 == 0 for n in shape)


def _trial_argument(x: Any, var: Any) -> Any:
    return x if x.ndim or var.aval.size == 1 else Table(var.aval.shape, lambda index: x)


def _place(x: Any, var: Any) -> Spread | Table:
    shape = var.aval.shape
    if isinstance(x, Table):
        return Table(shape, _reshaped(x, shape).entry) if math.prod(shape) > 1 else _one(x, shape)
    axes = tuple(a if n > 1 else "" for a, n in zip("qk", shape, strict=False))
    return Spread(x, axes if jnp.ndim(x) else ("",) * len(shape))


def _one(table: Table, shape: Sequence[int]) -> Spread:
    """Return a table of one entry as a number."""
    return Spread(table.entry((0,) * len(table.shape)), ("",) * len(shape))


def _spread(x: Any) -> Spread:
    if isinstance(x, Spread):
        return x
    if isinstance(x, Table) and math.prod(x.shape) == 1:
        return _one(x, x.shape)
    if isinstance(x, Table | _Index):
        raise UnsupportedPrimitive("an array that is neither over the scores nor looked up")
    return Spread(jnp.asarray(np.asarray(x).reshape(())), ("",) * np.ndim(x))


def _run(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    return walk(jaxpr, args, _RULES, _elementwise)


def _elementwise(eqn: Any, *inputs: Any) -> Any:
    """Apply an operation to each number of tiles, or to each entry of tables."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    if name not in _ELEMENTWISE and name not in _COMPOSED:
        raise UnsupportedPrimitive(name)
    if out.dtype not in _DTYPES:
        raise UnsupportedPrimitive(f"{name} to {out.dtype}")

    def apply(*values: Any) -> Any:
        if name in _COMPOSED:
            return _COMPOSED[name](*values)
        if name == "select_n" and len(values) > 3:
            return _select(values[0], values[1:])
        shape = jnp.broadcast_shapes(*map(jnp.shape, values))
        values = tuple(jnp.broadcast_to(x, shape) for x in values)
        return eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))

    if any(isinstance(x, Table) and math.prod(x.shape) > 1 for x in inputs):
        return Table(out.shape, lambda index: apply(*(_entry(x, index) for x in inputs)))
    spread = [_spread(x) for x in inputs]
    return Spread(apply(*(x.x for x in spread)), _merge(name, [x.axes for x in spread], out.ndim))


def _entry(x: Any, index: Sequence[Any]) -> Any:
    if isinstance(x, Table):
        return x.entry([i if n > 1 else 0 for i, n in zip(index, x.shape, strict=True)])
    x = _spread(x)
    if any(x.axes):
        raise UnsupportedPrimitive("an operation on a table and an array over the scores")
    return x.x


def _merge(name: str, axes: Sequence[tuple[str, ...]], ndim: int) -> tuple[str, ...]:
    merged = []
    for some in zip(*(x for x in axes if len(x) == ndim), strict=True):
        kinds = {*some} - {""}
        if len(kinds) > 1:
            raise UnsupportedPrimitive(f"{name} of queries with keys")
        merged.append(kinds.pop() if kinds else "")
    return tuple(merged) or ("",) * ndim


def _select(which: Any, choices: Sequence[Any]) -> Any:
    """Return choices[which], of numbers or tiles."""
    out = choices[0]
    index = jnp.asarray(which).astype(jnp.int32)
    for n, choice in enumerate(choices[1:], 1):
        chosen = index >= n if n == len(choices) - 1 else index == n
        out = jnp.where(chosen, choice, out)
    return out


def _broadcast(eqn: Any, x: Any) -> Any:
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    if isinstance(x, _Index):
        raise UnsupportedPrimitive(eqn.primitive.name)
    if isinstance(x, Table) and math.prod(x.shape) > 1:
        return Table(shape, lambda index: _entry(x, [index[d] for d in dims]))
    axes, x = [""] * len(shape), _spread(x)
    for d, axis in zip(dims, x.axes, strict=True):
        axes[d] = axis
    return Spread(x.x, tuple(axes))


def _reshape(eqn: Any, x: Any) -> Any:
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if isinstance(x, Table) and math.prod(x.shape) > 1:
        return _reshaped(x, after)
    x = _spread(x)
    kept = [axis for axis, n in zip(x.axes, before, strict=True) if n > 1]
    if any(x.axes) and [n for n in before if n > 1] != [n for n in after if n > 1]:
        raise UnsupportedPrimitive(eqn.primitive.name)
    if not any(x.axes):
        return Spread(x.x, ("",) * len(after))
    remaining = iter(kept)
    return Spread(x.x, tuple(next(remaining) if n > 1 else "" for n in after))


def _reshaped(x: Table, shape: Sequence[int]) -> Table:
    def entry(index: Sequence[Any]) -> Any:
        flat: Any = 0
        for i, n in zip(index, shape, strict=True):
            flat = flat * n + i if n > 1 else flat
        found = []
        for n in reversed(x.shape):
            found.append(flat % n if isinstance(flat, int) else lax.rem(flat, jnp.int32(n)))
            flat = flat // n if isinstance(flat, int) else lax.div(flat, jnp.int32(n))
        return x.entry(found[::-1])

    return x if x.shape == tuple(shape) else Table(tuple(shape), entry)


def _transpose(eqn: Any, x: Any) -> Any:
    order = eqn.params["permutation"]
    if isinstance(x, Table):
        back = [order.index(n) for n in range(len(order))]
        shape = tuple(x.shape[n] for n in order)
        return Table(shape, lambda index: x.entry([index[n] for n in back]))
    x = _spread(x)
    return Spread(x.x, tuple(x.axes[n] for n in order))


def _slice(eqn: Any, x: Any, *starts: Any) -> Any:
    shape, to = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    begin = [_spread(s).x for s in starts] or list(eqn.params["start_indices"])
    steps = eqn.params.get("strides") or (1,) * len(shape)
    if not isinstance(x, Table):
        x = _spread(x)
        if any(axis and n != m for axis, n, m in zip(x.axes, shape, to, strict=True)):
            raise UnsupportedPrimitive(eqn.primitive.name)
        return x

    def entry(index: Sequence[Any]) -> Any:
        first = [
            b if isinstance(b, int) else jnp.clip(b.astype(jnp.int32), 0, n - m)
            for b, n, m in zip(begin, shape, to, strict=True)
        ]
        return x.entry([b + i * s for b, i, s in zip(first, index, steps, strict=True)])

    found = Table(to, entry)
    return _one(found, to) if math.prod(to) == 1 else found


def _gather(eqn: Any, table: Any, index: Any) -> Any:
    """Look up entries of a table by an index for each axis."""
    shape, out, params = eqn.invars[0].aval.shape, eqn.outvars[0].aval, eqn.params
    numbers, mode = params["dimension_numbers"], params["mode"]
    if sorted(numbers.start_index_map) != list(range(len(shape))) or numbers.offset_dims:
        raise UnsupportedPrimitive("gather")
    columns = [_spread(x) for x in _columns(index, eqn.invars[1])]
    found: dict[int, Any] = {}
    for axis, x in zip(numbers.start_index_map, columns, strict=True):
        i = x.x.astype(jnp.int32)
        clipped = mode == lax.GatherScatterMode.CLIP
        found[axis] = jnp.clip(i, 0, shape[axis] - 1) if clipped else i
    table = table if isinstance(table, Table) else Table(shape, lambda index: _spread(table).x)
    value = _lookup(table, found)
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        fill = jnp.nan if params["fill_value"] is None else params["fill_value"]
        inside: Any = True
        for axis, i in found.items():
            inside = inside & (i >= 0) & (i < shape[axis])
        value = jnp.where(inside, value, jnp.asarray(fill, value.dtype))
    axes = [x.axes if len(x.axes) == out.ndim else x.axes[:-1] for x in columns]
    return Spread(value, _merge("gather", axes, out.ndim))


def _lookup(table: Table, indices: dict[int, Any]) -> Any:
    wide = [axis for axis, i in indices.items() if jnp.ndim(i) and table.shape[axis] > 1]
    sizes = [table.shape[axis] for axis in wide]
    if math.prod(sizes) > ENTRIES:
        raise UnsupportedPrimitive(
            f"gather from {math.prod(sizes)} entries, of more than {ENTRIES},"
        )
    at: list[Any] = [
        jnp.clip(indices[n], 0, size - 1) if size > 1 and n not in wide else 0
        for n, size in enumerate(table.shape)
    ]
    number: Any = 0
    for axis in wide:
        number = number * table.shape[axis] + indices[axis]
    entries = list(itertools.product(*map(range, sizes)))

    def choose(first: int, bit: int) -> Any:
        """Return the entry `number` of 2^bit entries from `first`, by its last bits."""
        if not bit:
            for axis, n in zip(wide, entries[first], strict=True):
                at[axis] = n
            return table.entry(at)
        half = 2 ** (bit - 1)
        low = choose(first, bit - 1)
        if first + half >= len(entries):
            return low
        return jnp.where((number & half) != 0, choose(first + half, bit - 1), low)

    return choose(0, max(len(entries) - 1, 0).bit_length())


def _join(eqn: Any, *inputs: Any) -> _Index:
    """Join the indices of several axes."""
    if eqn.params["dimension"] != eqn.outvars[0].aval.ndim - 1:
        raise UnsupportedPrimitive("concatenate")
    parts = zip(inputs, eqn.invars, strict=True)
    return _Index([x for part, var in parts for x in _columns(part, var)])


def _columns(x: Any, var: Any) -> list[Any]:
    if isinstance(x, _Index):
        return x.columns
    if var.aval.shape[-1:] != (1,):
        raise UnsupportedPrimitive("gather")
    return [x]


def _branch(eqn: Any, which: Any, *args: Any) -> Any:
    branches = []
    for branch in eqn.params["branches"]:
        body, consts = open_jaxpr(branch)
        branches.append([_spread(x) for x in _run(body, [*consts, *args])])
    index, outs = _spread(which).x, []
    for choices, var in zip(zip(*branches, strict=True), eqn.outvars, strict=True):
        axes = _merge("cond", [x.axes for x in choices], var.aval.ndim)
        outs.append(Spread(_select(index, [x.x for x in choices]), axes))
    return outs


def _custom(eqn: Any, *inputs: Any) -> Any:
    """Apply a function with a derivative of its own, traced for other shapes."""
    params = eqn.primitive.get_bind_params(eqn.params)
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    body, consts = open_jaxpr(eqn.params["call_jaxpr"])
    spread = [_spread(x) for x in inputs]
    axes: list[Any] = []

    def traced(*x: Any) -> Any:
        return eqn.primitive.bind(*x, **params)

    rule = jax.make_jaxpr(lambda x, dx: jax.jvp(traced, x, dx)[1])(tuple(avals), tuple(avals))

    def place(xs: Sequence[Any]) -> list[Spread]:
        return [Spread(x, s.axes) for x, s in zip(xs, spread, strict=True)]

    @jax.custom_jvp
    def fn(*xs: Any) -> list[Any]:
        outs = [_spread(x) for x in _run(body, [*consts, *place(xs)])]
        axes[:] = [x.axes for x in outs]
        return [x.x for x in outs]

    @fn.defjvp
    def _(xs: Any, dxs: Any) -> Any:
        outs = fn(*xs)
        found = _run(rule.jaxpr, [*rule.consts, *place(xs), *place(dxs)])
        tangents = [
            jnp.broadcast_to(_spread(x).x, y.shape) for x, y in zip(found, outs, strict=True)
        ]
        return outs, tangents

    return [Spread(x, a) for x, a in zip(fn(*(s.x for s in spread)), axes, strict=True)]


def _iota(eqn: Any) -> Table:
    axis, dtype = eqn.params["dimension"], eqn.params["dtype"]
    return Table(eqn.params["shape"], lambda index: jnp.asarray(index[axis]).astype(dtype))


_RULES: dict[str, Callable] = {
    "broadcast_in_dim": _broadcast, "reshape": _reshape, "squeeze": _reshape, "reshard": _reshape,
    "expand_dims": _reshape, "transpose": _transpose, "slice": _slice, "dynamic_slice": _slice,
    "gather": _gather, "concatenate": _join, "cond": _branch, "custom_jvp_call": _custom,
    "iota": _iota,
}  # fmt: skip


def _sloped(fn: Callable, slope: Callable) -> Callable:
    """Return fn with the derivative slope(x, fn(x))."""
    sloped = jax.custom_jvp(fn)

    @sloped.defjvp
    def _(x: Any, dx: Any) -> Any:
        y = sloped(*x)
        return y, slope(*x, y) * dx[0]

    return sloped


def _tanh(x: jax.Array) -> jax.Array:
    return 1 - 2 / (1 + jnp.exp2(jnp.clip(x, -15, 15) * (2 * math.log2(math.e))))


def _floor(x: jax.Array) -> jax.Array:
    whole = x.astype(jnp.int32).astype(x.dtype)
    return jnp.where(jnp.abs(x) < 2**23, whole - (whole > x).astype(x.dtype), x)


def _in_one_turn(x: jax.Array) -> jax.Array:
    """Return x − 2π·n in [−π, π]. The parts of 2π have few digits, so that products are exact."""
    turns = _floor(x * (0.5 / math.pi) + 0.5)
    for part in (6.28125, 1.9353071795e-3):
        x = x - turns * part
    return x


def _log1p(x: jax.Array) -> jax.Array:
    u = 1 + x
    return jnp.where(u == 1, x, jnp.log(u) * (x / jnp.where(u == 1, 1.0, u - 1)))


def _expm1(x: jax.Array) -> jax.Array:
    near = jnp.ones_like(x)
    for n in range(8, 1, -1):
        near = 1 + near * x / n
    return jnp.where(jnp.abs(x) < 0.5, near * x, jnp.exp(x) - 1)


_COMPOSED: dict[str, Callable] = {
    "tanh": _sloped(_tanh, lambda x, y: 1 - y * y),
    "log1p": _sloped(_log1p, lambda x, y: 1 / (1 + x)),
    "expm1": _sloped(_expm1, lambda x, y: y + 1), "floor": _floor, "ceil": lambda x: -_floor(-x),
    "sin": lambda x: jnp.sin(_in_one_turn(x)), "cos": lambda x: jnp.cos(_in_one_turn(x)),
    "is_finite": lambda x: jnp.abs(x) < jnp.inf,
}  # fmt: skip
