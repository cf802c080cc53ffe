"""`jax.shard_map` on all supported versions of JAX."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from flax_mha.base.trees import Static, is_traced
from flax_mha.sharding.rules import keep_axes


def mapped_axes() -> tuple[set[str], set[str]]:
    """Return the mesh axes that `jax.vmap` maps over: Explicit ones, and `spmd_axis_name`."""
    try:
        from jax._src.core import get_axis_env
    except ImportError:  # JAX has no public name for this. No axis then counts as mapped.
        return set(), set()
    env, mesh = get_axis_env(), jax.sharding.get_abstract_mesh()
    free = {*mesh.auto_axes, *mesh.explicit_axes}
    return free & env.explicit_mesh_axis_names, free & env.spmd_axis_names


def ambient_mesh() -> AbstractMesh:
    """Return the ambient mesh, where axes that `jax.vmap` maps over are Manual."""
    mesh, (explicit, spmd) = jax.sharding.get_abstract_mesh(), mapped_axes()
    return mesh.update_axis_types(dict.fromkeys(explicit | spmd, AxisType.Manual))


def put_on_mesh(x: jax.Array) -> jax.Array:
    """Put x on the ambient mesh inside `jax.vmap`, where JAX can't transpose a reshard to it."""
    if mapped_axes()[0] and jax.typeof(x).sharding.mesh.empty:
        x = jax.lax.squeeze(jax.lax.broadcast(x, (1,), out_sharding=PartitionSpec()), (0,))
    return x


def run_auto(fn: Callable[..., Any], specs: Any, *args: Any) -> Any:
    """Return fn(*args) sharded by `specs`. Inside fn, all axes are Auto."""
    mesh = jax.sharding.get_abstract_mesh()
    specs = jax.tree.map(lambda spec: keep_axes(spec, mesh.explicit_axes), specs)
    inside = jax.sharding.auto_axes(fn, axes=mesh.explicit_axes, out_sharding=specs)
    if mesh.manual_axes:
        # Inside `jax.shard_map`, JAX allows no residuals with Auto axes, and runs it only in jit.
        inside = jax.checkpoint(jax.jit(inside))
    return inside(*jax.tree.map(put_on_mesh, args))


def varying(x: Any) -> frozenset[str]:
    """Return the mesh axes over which x varies, inside a `jax.shard_map` with check_vma."""
    # JAX has renamed this attribute once.
    aval = jax.typeof(x)
    return getattr(getattr(aval, "mat", None), "varying", getattr(aval, "vma", frozenset()))


def vary(x: Any, like: Any) -> Any:
    """Mark x as varying over the mesh axes that `like` varies over, as carries of loops must."""
    missing = frozenset().union(*map(varying, jax.tree.leaves(like))) - varying(x)
    return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x


def run_on_shards(
    fn: Callable[..., Any], manual: set[str], ins: Any, outs: Any, *args: Any, pure: bool = True
) -> Any:
    """Return fn(*args), computed on shards along the `manual` mesh axes.

    Args:
      fn: a module's function, or a `Partial` of one, so that equal eager calls share a program.
      manual: mesh axes.
      ins: the PartitionSpecs of the arrays.
      outs: the PartitionSpecs of the result.
      *args: the arrays.
      pure: False if fn calls functions of the user.
    """
    mesh, (explicit, spmd) = jax.sharding.get_abstract_mesh(), mapped_axes()
    if (explicit | spmd).intersection(mesh.explicit_axes):
        return run_auto(lambda *args: run_on_shards(fn, manual, ins, outs, *args), outs, *args)
    if not manual:
        return fn(*args)
    manual = manual | spmd
    # Inside the caller's `jax.shard_map` with check_vma, gradients need the check here too.
    checked = any(varying(x) for x in jax.tree.leaves(args))
    if checked:
        # XLA does not allow varying residuals of a nested `jax.shard_map`.
        fn = jax.checkpoint(fn)
    form = frozenset(manual), tuple(ins), outs, checked
    if pure and not is_traced(args):
        # Outside jit, JAX would compile each operation of each call.
        return _run_compiled(Static((fn, form, nn.get_logical_axis_rules())), *args)
    shards = _on_shards(fn, *form)
    # With other axes left, JAX 0.10 runs it only inside jit.
    shards = shards if manual == {*mesh.axis_names} else jax.jit(shards)
    return shards(*args)


def _on_shards(
    fn: Callable[..., Any], manual: frozenset[str], ins: Any, outs: Any, checked: bool
) -> Callable[..., Any]:
    return jax.shard_map(fn, axis_names=manual, in_specs=ins, out_specs=outs, check_vma=checked)


@functools.partial(jax.jit, static_argnums=0)
def _run_compiled(call: Static, *args: Any) -> Any:
    fn, form, _ = call.tree
    return _on_shards(fn, *form)(*args)
