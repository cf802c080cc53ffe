"""Traced functions of masks and scores, which each machine runs in operations of its own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

# The dtypes of closed-over arrays.
DTYPES = frozenset(map(jnp.dtype, ("float32", "bfloat16", "int32", "uint32", "bool")))
CALLS = frozenset(("jit", "pjit", "closed_call", "core_call", "remat2"))


def trace(fn: Callable, *args: Any, num_static: int = 0) -> tuple[core.Jaxpr, list[Any]]:
    """Trace a function with one result. Return it and its closed-over arrays, its first arguments.

    The first `num_static` arguments are static. Equal calls of one fn share a trace.
    """
    closed = jax.make_jaxpr(fn, static_argnums=tuple(range(num_static)))(*args)
    return closed.jaxpr, list(closed.consts)


def variables(jaxpr: core.Jaxpr) -> list[Any]:
    """Return the closed-over arrays, and the arguments."""
    return [*jaxpr.constvars, *jaxpr.invars]


def count_operations(jaxpr: core.Jaxpr) -> int:
    """Return the number of operations, also in inner functions."""
    calls = (eqn.params["jaxpr"] for eqn in jaxpr.eqns if eqn.primitive.name in CALLS)
    return len(jaxpr.eqns) + sum(count_operations(open_jaxpr(x)[0]) for x in calls)


def open_jaxpr(x: Any) -> tuple[Any, list[Any]]:
    """Return a jaxpr and its constants, given a closed or an open jaxpr."""
    return getattr(x, "jaxpr", x), list(getattr(x, "consts", ()))


def select_among(which: Any, choices: Sequence[Any]) -> Any:
    """Return choices[which], of numbers or tiles."""
    out = choices[0]
    index = jnp.asarray(which).astype(jnp.int32)
    for n, choice in enumerate(choices[1:], 1):
        chosen = index >= n if n == len(choices) - 1 else index == n
        # Mosaic GPU expects a condition of the shape of the result.
        shape = jnp.broadcast_shapes(*map(jnp.shape, (chosen, choice, out)))
        out = jnp.where(*(jnp.broadcast_to(x, shape) for x in (chosen, choice, out)))
    return out


def run_branches(eqn: Any, args: Sequence[Any], run: Callable) -> list[tuple[Any, ...]]:
    """Return the results of all branches for each output, because kernels select among them."""
    branches = map(open_jaxpr, eqn.params["branches"])
    return list(zip(*(run(body, [*consts, *args]) for body, consts in branches), strict=True))


def run(
    jaxpr: Any, args: Sequence[Any], rules: Mapping[str, Callable], otherwise: Callable
) -> list[Any]:
    """Return the results of a jaxpr for its constants and arguments, in a machine's operations.

    `rules` has a function of an equation and its inputs for each primitive, and `otherwise` is the
    function for all others.
    """
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), args, strict=True))

    def read(x: Any) -> Any:
        return x.val if isinstance(x, core.Literal) else values[x]

    for eqn in jaxpr.eqns:
        inputs = [read(x) for x in eqn.invars]
        if eqn.primitive.name in CALLS:
            body, consts = open_jaxpr(eqn.params["jaxpr"])
            results = run(body, [*consts, *inputs], rules, otherwise)
        else:
            results = rules.get(eqn.primitive.name, otherwise)(eqn, *inputs)
            results = results if eqn.primitive.multiple_results else [results]
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]
