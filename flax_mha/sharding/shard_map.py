"""`jax.shard_map` on every version of JAX, and what varies inside it."""

from collections.abc import Callable
from typing import Any

import jax


def varying(x: Any) -> frozenset[str]:
    """Return the mesh axes over which x varies, inside a `jax.shard_map` with check_vma."""
    # JAX has no public name for it, and has changed it once.
    aval = jax.typeof(x)
    return getattr(getattr(aval, "mat", None), "varying", getattr(aval, "vma", frozenset()))


def vary(x: Any, like: Any) -> Any:
    """Return x, marked as varying over every mesh axis that `like` varies over.

    Inside `jax.shard_map` the carry of a loop must vary from the start over what it will.
    """
    missing = frozenset().union(*map(varying, jax.tree.leaves(like))) - varying(x)
    return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x


def over(fn: Callable[..., Any], manual: set[str], ins: Any, outs: Any, *args: Any) -> Any:
    """fn(*args) on each device's shards along some mesh axes; the others stay as they are.

    Args:
      fn: of arrays, on Manual axes.
      manual: those mesh axes.
      ins: PartitionSpecs of args.
      outs: those of the result.
      *args: arrays, on Explicit axes laid out so.
    """
    if not manual:
        return fn(*args)
    # Where the caller's own `jax.shard_map` has JAX check what varies, gradients need it here too.
    checked = any(varying(x) for x in jax.tree.leaves(args))
    if checked:
        # XLA refuses the residuals of one `jax.shard_map` in another that do vary.
        fn = jax.checkpoint(fn)
    shards = jax.shard_map(
        fn, axis_names=manual, in_specs=tuple(ins), out_specs=outs, check_vma=checked
    )
    mesh = jax.sharding.get_abstract_mesh()
    # Where axes are left, JAX 0.10 does not run it outside jit.
    shards = shards if manual == {*mesh.axis_names} else jax.jit(shards)
    return shards(*args)
