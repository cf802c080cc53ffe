"""Parameters with logical axis names: their shardings, and each shard born on its device."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax.core import meta
from flax.typing import Dtype, Initializer
from jax.sharding import NamedSharding, PartitionSpec

from flax_mha.sharding import layout, rules

# True while `of` traces: parameters then carry their logical names, whatever `partitioned` says.
# A JAX context, since a traced function is cached by the contexts it was traced in.
_naming = jax.make_user_context(False)


class Named(nn.LogicallyPartitioned):
    """A parameter's value with its logical axis names."""

    def unbox(self, apply_constraint: bool = True) -> Any:
        """The value as it is: Flax's own box would constrain it, which Explicit axes refuse."""
        del apply_constraint
        return self.value


def named(init: Initializer, names: rules.LogicalNames, partitioned: bool = False) -> Initializer:
    """Gives the parameters that init makes their logical axis names.

    They are boxed with them, as by `nn.with_logical_partitioning`, if `partitioned`, and while
    `sharding.of` reads the names. Otherwise they are plain arrays. A box that init itself makes
    is kept.
    """

    def initialize(rng: jax.Array, shape: Sequence[int], dtype: Dtype) -> Any:
        value = init(rng, shape, dtype)
        boxed = (partitioned or _naming.value) and not isinstance(value, meta.AxisMetadata)
        return Named(value, names) if boxed else value

    return initialize


def name(x: Any, names: rules.LogicalNames) -> Any:
    """Gives a variable that is no parameter its logical axis names, while `of` reads them."""
    return Named(x, names) if _naming.value else x


def of(fn: Callable[..., Any], *args: Any) -> Any:
    """The shardings of fn's result, from the logical names of the parameters in it.

    Args:
      fn: a function that initializes flax modules (and perhaps an optimizer); traced, not run.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct`.

    Returns:
      The result's tree (boxes removed) of `NamedSharding` over the ambient mesh.

    Raises:
      ValueError: without an ambient mesh.
    """
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise ValueError("shardings need a mesh, got none; wrap in `with jax.set_mesh(mesh)`")
    with _naming(True):
        abstract = jax.eval_shape(fn, *args)

    def spec(names: PartitionSpec, x: jax.ShapeDtypeStruct) -> NamedSharding:
        filled = (*names, *[None] * (x.ndim - len(names)))
        spec = rules.checked(x.shape, filled, mesh.abstract_mesh)
        return NamedSharding(mesh, rules.filled(spec))

    return jax.tree.map(
        spec, nn.get_partition_spec(abstract), meta.unbox(abstract),
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )  # fmt: skip


def init(model: nn.Module, rngs: Any, *args: Any, **kwargs: Any) -> Any:
    """`model.init`, every shard born on its device; without a mesh `jax.jit(model.init)`."""

    def create(rngs: Any, *args: Any) -> Any:
        with layout.initializing(True):
            return model.init(rngs, *args, **kwargs)

    if jax.sharding.get_mesh().empty:
        return jax.jit(create)(rngs, *args)
    shardings = of(create, rngs, *args)
    if explicit := jax.sharding.get_abstract_mesh().explicit_axes:
        # Else each device draws whole parameters, rounded otherwise, and keeps its shard.
        specs = jax.tree.map(lambda at: rules.only(at.spec, explicit), shardings)
        create = jax.sharding.auto_axes(create, axes=explicit, out_sharding=specs)
    return jax.jit(create, out_shardings=shardings)(rngs, *args)
