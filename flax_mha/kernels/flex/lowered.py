# Over 300 lines: one rule for each operation that Mosaic lacks.
"""Functions of scores in operations that Mosaic has, Pallas' compiler for TPUs.

What a mask or a score does, a user's function included, is traced once, of one tile, and carried
out again in a kernel with

- all arrays of one element as [1, 1], and vectors as [1, n]: Mosaic thinks in two dimensions;
- look-ups in small tables, which it lacks, as selections among their entries, which have exact
  gradients; indices are followed back to where they came from, so that their third axis, and what
  else nothing asks for, never exists;
- branches on an index as selections, too.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

# The most entries of a table that a tile may be looked up in: each is a selection, unrolled.
ENTRIES = 256

# Those that libtpu compiles; all of arrays of one shape, or of shapes that broadcast to it.
_NAMES = """
    abs add add_any and atan2 broadcast_in_dim ceil clamp clz convert_element_type copy cos
    custom_jvp_call div eq erf exp exp2 floor ge gt integer_pow iota is_finite jit le log log1p
    logistic lt max min mul ne neg not or pjit population_count pow reduce_max reduce_min
    reduce_sum rem reshard reshape round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sqrt square squeeze stop_gradient sub tan tanh xor
"""
_ALLOWED = frozenset(_NAMES.split())
# Of what functions make and close over.
DTYPES = frozenset(map(jnp.dtype, ("float32", "bfloat16", "int32", "uint32", "bool")))
_CALLS = frozenset(("jit", "pjit", "closed_call", "core_call", "checkpoint"))


def flat(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape that stands for another: [1, 1] for one element, [1, n] for a vector."""
    if math.prod(shape) == 1:
        return (1, 1)
    return (1, *shape) if len(shape) == 1 else tuple(shape)


class Function(NamedTuple):
    """A traced function, of one result. It takes and gives arrays of `flat` shapes."""

    jaxpr: Any

    @classmethod
    def of(cls, fn: Callable, *avals: Any) -> "tuple[Function, list[Any]]":
        """Traces fn; the arrays that it closes over are arguments before the others."""
        closed = jax.make_jaxpr(fn)(*avals)
        return cls(closed.jaxpr), list(closed.consts)

    def __call__(self, *args: Any) -> Any:
        """The result for arrays that the function closes over, and those that it takes."""
        (out,) = _nodes(self.jaxpr, [_Node(x) for x in args])
        return jnp.broadcast_to(out.value, flat(self.jaxpr.outvars[0].aval.shape))

    def lacks(self) -> str | None:
        """The name of an operation that Mosaic lacks, or None."""
        avals = [x.aval for x in (*self.jaxpr.constvars, *self.jaxpr.invars)]
        args = [jax.ShapeDtypeStruct(flat(x.shape), x.dtype) for x in avals]
        try:
            return _lacks(jax.make_jaxpr(self.__call__)(*args).jaxpr)
        except _Lacking as error:
            return str(error)


class _Lacking(Exception):  # noqa: N818 — it says what is, not what went wrong
    """An operation can't be carried out."""


def _lacks(jaxpr: Any) -> str | None:
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
            found = _lacks(_open(x)[0]) if _is_jaxpr(x) else None
            if found:
                return found
    return None


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, core.Jaxpr | core.ClosedJaxpr)


def _open(x: Any) -> tuple[Any, list[Any]]:
    """A function and its constants, in either of JAX' forms."""
    return getattr(x, "jaxpr", x), list(getattr(x, "consts", ()))


class _Node:
    """A value that is computed when it is first asked for, from its equation's inputs."""

    def __init__(self, value: Any = None, eqn: Any = None, inputs: Sequence["_Node"] = ()) -> None:
        self._value, self.eqn, self.inputs = value, eqn, inputs
        self.name = "" if eqn is None else eqn.primitive.name

    @property
    def value(self) -> Any:
        if self._value is None:
            self._value = _RULES.get(self.name, _bind)(self.eqn, self.inputs)
        return self._value


class _Part(_Node):
    """One of several results."""

    def __init__(self, of: _Node, n: int) -> None:
        super().__init__()
        self._of, self._n = of, n

    @property
    def value(self) -> Any:
        return self._of.value[self._n]


def _nodes(jaxpr: Any, args: Sequence[_Node]) -> list[_Node]:
    """The results of a function of nodes, those of its constants first."""
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), args, strict=True))

    def read(x: Any) -> _Node:
        return _Node(x.val) if isinstance(x, core.Literal) else known[x]

    for eqn in jaxpr.eqns:
        inputs = [read(x) for x in eqn.invars]
        if eqn.primitive.name in _CALLS:
            body, consts = _open(eqn.params["jaxpr"])
            found = _nodes(body, [*map(_Node, consts), *inputs])
        elif eqn.primitive.multiple_results:
            whole = _Node(eqn=eqn, inputs=inputs)
            found = [_Part(whole, n) for n in range(len(eqn.outvars))]
        else:
            found = [_Node(eqn=eqn, inputs=inputs)]
        for var, node in zip(eqn.outvars, found, strict=True):
            known[var] = node
            if len(var.aval.shape) <= 2:
                # At once: a chain of them would be as deep as it is long.
                _ = node.value
    return [read(x) for x in jaxpr.outvars]


def _bind(eqn: Any, inputs: Sequence[_Node]) -> Any:
    """An operation as it is."""
    values = [node.value for node in inputs]
    if eqn.primitive.name == "custom_jvp_call":
        # Its derivative is a function of the shapes that it was traced with.
        values = [jnp.reshape(x, v.aval.shape) for x, v in zip(values, eqn.invars, strict=True)]
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    if eqn.primitive.multiple_results:
        return [jnp.reshape(x, flat(x.shape)) for x in out]
    return out


def _fill(eqn: Any, inputs: Sequence[_Node]) -> Any:
    """A broadcast: nothing, of what broadcasts by itself."""
    shape, axes = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    x = inputs[0].value
    to = flat(shape)
    if jnp.size(x) == 1 or (jnp.ndim(x) == len(shape) == len(axes)):
        return jnp.broadcast_to(x, to)
    # A vector, along the one axis or the other.
    return jnp.broadcast_to(jnp.reshape(x, (1, -1) if axes[0] == len(shape) - 1 else (-1, 1)), to)


def _same(eqn: Any, inputs: Sequence[_Node]) -> Any:
    """A change of rank, or of nothing that a kernel knows of."""
    return jnp.reshape(inputs[0].value, flat(eqn.outvars[0].aval.shape))


def _select(eqn: Any, inputs: Sequence[_Node]) -> Any:
    which, *cases = (node.value for node in inputs)
    to = flat(eqn.outvars[0].aval.shape)
    return lax.select_n(*(jnp.broadcast_to(x, to) for x in (which, *cases)))


def _branch(eqn: Any, inputs: Sequence[_Node]) -> Any:
    """Of all branches the one asked for: Mosaic has no branches with results of truth values."""
    which, *args = inputs
    branches = []
    for branch in eqn.params["branches"]:
        body, consts = _open(branch)
        branches.append(_nodes(body, [*map(_Node, consts), *args]))
    index = jnp.asarray(which.value).astype(jnp.int32)
    outs = []
    for choices, var in zip(zip(*branches, strict=True), eqn.outvars, strict=True):
        to = flat(var.aval.shape)
        out = jnp.broadcast_to(choices[0].value, to)
        for n, node in enumerate(choices[1:], 1):
            last = n == len(choices) - 1
            chosen = jnp.broadcast_to(index >= n if last else index == n, to)
            out = jnp.where(chosen, node.value, out)
        outs.append(out)
    return outs


def _gather(eqn: Any, inputs: Sequence[_Node]) -> Any:
    """Entries of a table by the index along each of its axes."""
    shape, to, params = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, eqn.params
    numbers, mode = params["dimension_numbers"], params["mode"]
    if sorted(numbers.start_index_map) != list(range(len(shape))) or numbers.offset_dims:
        raise _Lacking("gather")
    indices: dict[int, Any] = {}
    columns = _columns(inputs[1], eqn.invars[1].aval.shape)
    for axis, index in zip(numbers.start_index_map, columns, strict=True):
        clipped = mode == lax.GatherScatterMode.CLIP
        index = jnp.clip(index, 0, shape[axis] - 1) if clipped else index
        indices[axis + len(flat(shape)) - len(shape)] = index
    fill = jnp.nan if params["fill_value"] is None else params["fill_value"]
    outside = fill if mode == lax.GatherScatterMode.FILL_OR_DROP else None
    return jnp.broadcast_to(_lookup(inputs[0].value, indices, outside), flat(to))


def _columns(node: _Node, shape: Sequence[int]) -> list[Any]:
    """The parts of an array of indices [..., n], as arrays that broadcast against each other."""
    if node.name == "concatenate" and node.eqn.params["dimension"] == len(shape) - 1:
        parts = zip(node.inputs, node.eqn.invars, strict=True)
        return [c for x, v in parts for c in _columns(x, v.aval.shape)]
    if shape[-1] != 1 or len(shape) > 3:
        raise _Lacking("gather")
    while node.name in ("broadcast_in_dim", "reshape", "squeeze"):
        x = node.eqn.invars[0].aval.shape
        axes = node.eqn.params.get("broadcast_dimensions")
        kept = tuple(axes) == tuple(range(len(x))) if axes is not None else math.prod(x) == 1
        if not (kept and (len(x) == 2 or math.prod(x) == 1)):
            break
        node = node.inputs[0]
    x = node.value
    return [jnp.reshape(x, flat(x.shape[:-1])) if jnp.ndim(x) == 3 else jnp.asarray(x)]


def _lookup(table: Any, indices: dict[int, Any], outside: Any) -> Any:
    """table[indices], with one index for each axis of more than one entry."""
    wide = {axis: x for axis, x in indices.items() if jnp.size(x) > 1 and table.shape[axis] > 1}
    inside: Any = True
    for axis, index in indices.items():
        index = index.astype(jnp.int32)
        inside = inside & (index >= 0) & (index < table.shape[axis])
        if axis not in wide:
            table = _at(table, axis, index)
    sizes = [table.shape[axis] for axis in wide]
    if math.prod(sizes) > ENTRIES:
        raise _Lacking(f"gather from {math.prod(sizes)} entries, of more than {ENTRIES},")
    out: Any = None
    for entry in itertools.product(*map(range, sizes)):
        value, here = table, True
        for axis, n in zip(wide, entry, strict=True):
            value, here = _at(value, axis, n), here & (wide[axis] == n)
        out = value if out is None else jnp.where(here, value, out)
    return out if outside is None else jnp.where(inside, out, jnp.asarray(outside, out.dtype))


def _at(table: Any, axis: int, index: Any) -> Any:
    """table[index] along an axis, which is kept: a sum in which all others are 0."""
    entries = lax.broadcasted_iota(jnp.int32, table.shape, axis)
    one = jnp.where(entries == index, table, jnp.zeros_like(table))
    return jnp.sum(one, axis, keepdims=True, dtype=table.dtype)


def _slice(eqn: Any, inputs: Sequence[_Node]) -> Any:
    """Of each axis all, or one entry."""
    shape, to = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    x, *given = (node.value for node in inputs)
    starts = given or eqn.params["start_indices"]
    for axis, (whole, part, start) in enumerate(zip(shape, to, starts, strict=True)):
        if part == whole:
            continue
        if part != 1 or len(shape) > 2:
            raise _Lacking(eqn.primitive.name)
        x = _at(x, axis + 2 - len(shape), jnp.clip(start, 0, whole - 1))
    return jnp.reshape(x, flat(to))


def _iota(eqn: Any, _: Sequence[_Node]) -> Any:
    shape, to = eqn.params["shape"], flat(eqn.params["shape"])
    axis = eqn.params["dimension"] + len(to) - len(shape)
    return lax.broadcasted_iota(eqn.params["dtype"], to, axis)


def _sign(eqn: Any, inputs: Sequence[_Node]) -> Any:
    """For what Mosaic makes of that of integers (in `//`), the TPU has to be there."""
    x = inputs[0].value
    whole = jnp.issubdtype(x.dtype, jnp.integer)
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype) if whole else _bind(eqn, inputs)


_RULES: dict[str, Callable] = {
    "broadcast_in_dim": _fill, "reshape": _same, "reshard": _same, "squeeze": _same,
    "select_n": _select, "sign": _sign, "cond": _branch, "gather": _gather, "slice": _slice,
    "dynamic_slice": _slice, "iota": _iota,
    "clamp": lambda _, x: jnp.clip(x[1].value, x[0].value, x[2].value),
}  # fmt: skip
