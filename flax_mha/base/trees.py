"""Trees taken apart by what their leaves are, such as what takes gradients, and put together."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

IsLeaf: TypeAlias = Callable[[Any], bool]


def partition(
    tree: Any, chosen: Callable[[Any], bool], is_leaf: IsLeaf | None = None
) -> tuple[Any, Any]:
    """Split a tree into the leaves that are chosen, and the others, with None for the missing."""
    return (
        jax.tree.map(lambda x: x if chosen(x) else None, tree, is_leaf=is_leaf),
        jax.tree.map(lambda x: None if chosen(x) else x, tree, is_leaf=is_leaf),
    )


def combine(one: Any, other: Any, is_leaf: IsLeaf = lambda _: False) -> Any:
    """Return the tree that `partition` has split into these two."""
    return jax.tree.map(
        lambda x, y: y if x is None else x, one, other, is_leaf=lambda x: x is None or is_leaf(x)
    )


def is_array(x: Any) -> bool:
    """Return True for arrays of JAX, traced ones too."""
    return isinstance(x, jax.Array)


def tree_nodes(tree: Any) -> list[Any]:
    """Return all nodes of a tree, the inner ones too."""
    nodes = []

    def visit(x: Any) -> bool:
        nodes.append(x)
        return False

    jax.tree.flatten(tree, is_leaf=visit)
    return nodes


def is_inexact(x: Any) -> bool:
    """Return True if a leaf takes gradients: it is floating point."""
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))


def trace_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn(static, *arrays), traced anew only for another `static`, shape or dtype.

    What was traced is inlined: XLA sees no call. The layers of a stack are so traced in a fraction
    of the time, forward and backward.

    Args:
      fn: whose first argument is known before tracing. Where that is not `pure`, for it holds
        functions of a user's, which may read what changes, fn is traced each time.
    """
    shared = jax.jit(fn, static_argnums=0, inline=True)

    @functools.wraps(fn)
    def call(static: Any, *arrays: Any) -> Any:
        return (shared if static.pure else fn)(static, *arrays)

    return call
