"""`jax.shard_map` on all supported versions of JAX."""

import functools
import types
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np


def varying(x: Any) -> frozenset[str]:
    """Return the mesh axes over which x varies, inside a `jax.shard_map` with check_vma."""
    # JAX has no public name for this, and has changed the private one once.
    aval = jax.typeof(x)
    return getattr(getattr(aval, "mat", None), "varying", getattr(aval, "vma", frozenset()))


def vary(x: Any, like: Any) -> Any:
    """Mark x as varying over every mesh axis that `like` varies over.

    Inside `jax.shard_map`, a loop's initial carry must vary over the same axes as its final carry.
    """
    missing = frozenset().union(*map(varying, jax.tree.leaves(like))) - varying(x)
    return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x


class _Program:
    """A function that equals another with the same code, values in its closures, and axis rules.

    So JAX compiles a function once that is made anew in each call.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self.key = fn, (_key(fn), _key(nn.get_logical_axis_rules()))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Program) and self.key == other.key


def _key(x: Any) -> Any:
    """Return the code and values of a function, or the value of a tree, in hashable form."""
    if isinstance(x, types.FunctionType):
        cells = [cell.cell_contents for cell in x.__closure__ or ()]
        return x.__code__, _key((cells, x.__defaults__, x.__kwdefaults__))
    if isinstance(x, functools.partial):
        return functools.partial, _key((x.func, x.args, x.keywords))
    if isinstance(x, np.ndarray):
        return x.shape, x.dtype, x.tobytes()
    if isinstance(x, set):
        return frozenset(x)
    leaves, tree = jax.tree.flatten(x)
    return tree if not leaves else (type(x), x) if leaves[0] is x else (tree, *map(_key, leaves))


@functools.partial(jax.jit, static_argnums=0)
def _run(program: _Program, *args: Any) -> Any:
    return program.fn(*args)


def run_on_shards(
    fn: Callable[..., Any], manual: set[str], ins: Any, outs: Any, *args: Any, pure: bool = True
) -> Any:
    """Return fn(*args), computed on shards along the `manual` mesh axes.

    `ins` and `outs` are the PartitionSpecs of the arrays and of the result. On Explicit axes, the
    arrays are already sharded by `ins`. fn closes over no JAX array. It is not `pure` if it calls
    functions of the user, which may read mutable state.
    """
    if not manual:
        return fn(*args)
    # Inside the caller's `jax.shard_map` with check_vma, gradients need the check here too.
    checked = any(varying(x) for x in jax.tree.leaves(args))
    if checked:
        # XLA does not allow varying residuals of a nested `jax.shard_map`.
        fn = jax.checkpoint(fn)
    shards = jax.shard_map(
        fn, axis_names=manual, in_specs=tuple(ins), out_specs=outs, check_vma=checked
    )
    mesh = jax.sharding.get_abstract_mesh()
    if pure and not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
        # Outside jit, JAX would compile each operation of each call.
        return _run(_Program(shards), *args)
    # With other axes left, JAX 0.10 runs it only inside jit.
    shards = shards if manual == {*mesh.axis_names} else jax.jit(shards)
    return shards(*args)
