"""`jax.shard_map` on all supported versions of JAX."""

from collections.abc import Callable
from typing import Any

import jax

from flax_mha.base import trees


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
    if pure and not trees.is_traced(args):
        # Outside jit, JAX would compile each operation of each call.
        return trees.run_once(shards, *args)
    # With other axes left, JAX 0.10 runs it only inside jit.
    shards = shards if manual == {*mesh.axis_names} else jax.jit(shards)
    return shards(*args)
