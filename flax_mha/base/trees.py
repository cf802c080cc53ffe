"""Tools for trees: export, partition leaves, list nodes, and trace functions of trees once."""

import contextlib
import functools
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.traverse_util import flatten_dict

IsLeaf: TypeAlias = Callable[[Any], bool]


class Struct(struct.PyTreeNode):
    """A frozen tree of arrays, which exported programs can take and return."""

    if TYPE_CHECKING:  # Flax does not annotate it.

        def __init__(self) -> None: ...

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register the subclass as a tree, with its static fields as JSON for `jax.export`."""
        super().__init_subclass__(**kwargs)
        with contextlib.suppress(ValueError):  # A notebook defines a class again.
            jax.export.register_pytree_node_serialization(
                cls, serialized_name=f"{cls.__module__}.{cls.__qualname__}",
                serialize_auxdata=lambda static: json.dumps(static, default=_encode).encode(),
                deserialize_auxdata=lambda data: _decode(json.loads(data)),
            )  # fmt: skip


def _encode(x: Any) -> Any:
    return {"dtype": jnp.dtype(x).name}


def _decode(x: Any) -> Any:
    if isinstance(x, dict):
        return jnp.dtype(x["dtype"])
    return tuple(map(_decode, x)) if isinstance(x, list) else x


def partition(
    tree: Any, chosen: Callable[[Any], bool], is_leaf: IsLeaf | None = None
) -> tuple[Any, Any]:
    """Split a tree into its chosen leaves and its other leaves, with None for the missing ones."""
    return (
        jax.tree.map(lambda x: x if chosen(x) else None, tree, is_leaf=is_leaf),
        jax.tree.map(lambda x: None if chosen(x) else x, tree, is_leaf=is_leaf),
    )


def combine(one: Any, other: Any, is_leaf: IsLeaf = lambda _: False) -> Any:
    """Join the two trees that `partition` returned."""
    return jax.tree.map(
        lambda x, y: y if x is None else x, one, other, is_leaf=lambda x: x is None or is_leaf(x)
    )


def parameters_by_path(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters by path. A restored state of nnx loses its last level, `value`."""
    flat = flatten_dict(variables["params"], sep="/")
    return {path.removesuffix("/value"): x for path, x in flat.items()}


def is_array(x: Any) -> bool:
    """Tell if x is a JAX array, traced or not."""
    return isinstance(x, jax.Array)


def tree_nodes(tree: Any) -> list[Any]:
    """List all nodes of a tree, inner nodes and leaves."""
    nodes = []

    def visit(x: Any) -> bool:
        nodes.append(x)
        return False

    jax.tree.flatten(tree, is_leaf=visit)
    return nodes


def is_inexact(x: Any) -> bool:
    """Tell if a leaf is floating point, so that it has gradients."""
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))


def trace_once(fn: Callable[..., Any], num_static: int = 1) -> Callable[..., Any]:
    """Make fn(*static, *arrays) trace once for each value of `static` and each shape and dtype.

    The layers of a stack then share one trace, which is inlined, unless static[0].pure is False: fn
    then calls functions of the user.
    """
    shared = jax.jit(fn, static_argnums=range(num_static), inline=True)

    @functools.wraps(fn)
    def call(first: Any, *rest: Any) -> Any:
        return (shared if first.pure else fn)(first, *rest)

    return call


class Static:
    """A tree as a static argument of `jax.jit`. Two are equal if their leaves are.

    NumPy arrays compare by value, functions by identity, a `jax.tree_util.Partial` by its leaves.
    """

    def __init__(self, tree: Any) -> None:
        leaves, form = jax.tree.flatten(tree)
        self.tree, self._key = tree, (form, *map(_by_value, leaves))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _by_value(x: Any) -> Any:
    return (x.shape, x.dtype, x.tobytes()) if isinstance(x, np.ndarray) else (type(x), x)


def is_traced(tree: Any) -> bool:
    """Tell if any array of the tree is traced."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))
