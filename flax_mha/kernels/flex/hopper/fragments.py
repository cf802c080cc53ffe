"""Functions of scores in operations of Mosaic GPU, on the registers of a warpgroup.

A mask or score function is traced once, for two queries and two keys. In a kernel its operations
run on tiles and numbers, so they must be elementwise. Branches are selections.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from flax_mha.kernels.call.spec import Unsupported
from flax_mha.kernels.flex import function as functions
from flax_mha.kernels.flex.function import open_jaxpr, variables
from flax_mha.kernels.flex.hopper.composed import COMPOSED
from flax_mha.kernels.flex.operand import Operand

_NAMES = """
    abs add and atan2 clamp clz convert_element_type copy div eq erf exp exp2 ge gt
    integer_pow le log logistic lt max min mul ne neg not one_minus_square or reduce_precision
    rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign
    sqrt square stop_gradient sub xor
"""
_ELEMENTWISE = frozenset(_NAMES.split())
_DTYPES = frozenset(map(jnp.dtype, ("float32", "bfloat16", "float16", "int32", "uint32", "bool")))


def call(function: core.Jaxpr, *args: Any) -> Any:
    """Return the scores for closed-over arrays and arguments: tiles and numbers."""
    return _run(function, args)[0]


def call_with_slope(function: core.Jaxpr, args: Sequence[Any], at: int) -> tuple[Any, Any]:
    """Return the scores, and their derivative by the argument of this number.

    JAX differentiates the function as it was traced. In a kernel it would emit operations that
    Mosaic GPU lacks.
    """
    consts = len(function.constvars)

    def both(values: list[Any]) -> Any:
        def score(x: Any) -> Any:
            changed = [*values[:at], x, *values[at + 1 :]]
            closed = core.ClosedJaxpr(function, changed[:consts])
            return core.jaxpr_as_fun(closed)(*changed[consts:])[0]

        return jax.jvp(score, (values[at],), (jnp.ones_like(values[at]),))

    traced = jax.make_jaxpr(both)([x.aval for x in variables(function)])
    out, slope = _run(traced.jaxpr, [*traced.consts, *args])
    return out, slope


def missing(function: core.Jaxpr, operands: Sequence[Operand]) -> str | None:
    """Return an operation that kernels lack, for the function or its derivatives, or None.

    `operands` are the layouts of its first arguments.
    """
    for operand in operands:
        if operand.layout == "whole" and math.prod(operand.shape) > 1:
            return f"a look-up in an array {operand.dtype}{list(operand.shape)}"
    numbers = [jax.ShapeDtypeStruct((), x.aval.dtype) for x in variables(function)]
    try:
        jax.eval_shape(functools.partial(call, function), *numbers)
        for at, x in enumerate(numbers):
            if jnp.issubdtype(x.dtype, jnp.floating):
                jax.eval_shape(lambda *args, at=at: call_with_slope(function, args, at), *numbers)
    except Unsupported as error:
        return str(error)
    return None


def _run(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    return functions.run(jaxpr, args, _RULES, _elementwise)


def _elementwise(eqn: Any, *inputs: Any) -> Any:
    """Apply an operation to each number of tiles."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    if name not in _ELEMENTWISE and name not in COMPOSED:
        raise Unsupported(name)
    if out.dtype not in _DTYPES:
        raise Unsupported(f"{name} to {out.dtype}")
    values = [_number(x) for x in inputs]
    if name in COMPOSED:
        return COMPOSED[name](*values)
    if name == "convert_element_type" and out.dtype == jnp.bool_:
        return values[0] != 0
    if name == "select_n" and len(values) > 3:
        return functions.select_among(values[0], values[1:])
    shape = jnp.broadcast_shapes(*map(jnp.shape, values))
    values = [jnp.broadcast_to(x, shape) for x in values]
    return eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))


def _number(x: Any) -> Any:
    """Return a literal as a number without axes, and others as they are."""
    return x if isinstance(x, jax.Array) else jnp.asarray(np.asarray(x).reshape(()))


def _same(eqn: Any, x: Any, *_: Any) -> Any:
    """Return the input of a change of shape, which changes no number."""
    return _number(x)


def _branch(eqn: Any, which: Any, *args: Any) -> Any:
    choices = functions.run_branches(eqn, args, _run)
    return [functions.select_among(which, [*map(_number, results)]) for results in choices]


def _custom(eqn: Any, *inputs: Any) -> Any:
    """Apply a function with a derivative of its own, which has been taken already."""
    body, consts = open_jaxpr(eqn.params["call_jaxpr"])
    return _run(body, [*consts, *inputs])


_RULES: dict[str, Callable] = {
    **dict.fromkeys(("broadcast_in_dim", "reshape", "reshard", "squeeze", "expand_dims"), _same),
    "cond": _branch, "custom_jvp_call": _custom,
}  # fmt: skip
