"""Parameters with logical axis names: their shardings, and sharded initialization."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax.core import meta
from flax.typing import Dtype, Initializer
from jax.sharding import NamedSharding, PartitionSpec

from flax_mha.base import shapes
from flax_mha.sharding import layout, rules

# True while `of` traces: parameters are boxed with their names. The context keys JAX's caches.
_naming = jax.make_user_context(False)


class Named(nn.LogicallyPartitioned):
    """A parameter's value with its logical axis names."""

    def unbox(self, apply_constraint: bool = True) -> Any:
        """Return the value. JAX rejects Flax's sharding constraint on Explicit axes."""
        return self.value

    def add_axis(self, index: int, params: dict[Any, Any]) -> Any:
        """Add the axis of a Flax transformation, without a name by default."""
        # Flax inserts names at a negative index one place too early.
        index %= len(self.names) + 1
        return super().add_axis(index, {nn.PARTITION_NAME: None} | params)

    def remove_axis(self, index: int, params: dict[Any, Any]) -> Any:
        """Remove an axis that `add_axis` has added."""
        return super().remove_axis(index, {nn.PARTITION_NAME: None} | params)


def named(init: Initializer, names: rules.LogicalNames, partitioned: bool = False) -> Initializer:
    """Return an initializer of parameters with a logical name, or None, for each axis.

    Parameters are plain arrays, unless `partitioned` boxes them as `nn.with_logical_partitioning`
    does.
    """

    def initialize(rng: jax.Array, shape: Sequence[int], dtype: Dtype) -> Any:
        value = shapes.draw(init, rng, tuple(shape), dtype)
        boxed = (partitioned or _naming.value) and not isinstance(value, meta.AxisMetadata)
        return Named(value, names) if boxed else value

    return initialize


def name(x: Any, names: rules.LogicalNames) -> Any:
    """Box a variable with its logical axis names, while `sharding.of` reads them."""
    return Named(x, names) if _naming.value else x


def of(fn: Callable[..., Any], *args: Any) -> Any:
    """Return the shardings of the parameters that a function creates.

    Args:
      fn: a function that initializes Flax modules, and perhaps an optimizer.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct`.

    Returns:
      The tree of its result, with a `NamedSharding` over the ambient mesh for each leaf.

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
        spec = rules.resolve_spec(x.shape, filled, mesh.abstract_mesh)
        return NamedSharding(mesh, rules.fill_unconstrained(spec))

    return jax.tree.map(
        spec, nn.get_partition_spec(abstract), meta.unbox(abstract),
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )  # fmt: skip


def init(model: nn.Module, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Initialize a Flax module sharded over the ambient mesh.

    The other arguments are passed to `model.init`.
    """

    def create(rngs: Any, *args: Any) -> Any:
        with layout.initializing(True):
            return model.init(rngs, *args, **kwargs)

    shardings = None if jax.sharding.get_mesh().empty else of(create, rngs, *args)
    if explicit := jax.sharding.get_abstract_mesh().explicit_axes:
        # Otherwise each device would draw the full parameters, with other rounding.
        specs = jax.tree.map(lambda at: rules.keep_axes(at.spec, explicit), shardings)
        create = jax.sharding.auto_axes(create, axes=explicit, out_sharding=specs)
    variables: dict[str, Any] = jax.jit(create, out_shardings=shardings)(rngs, *args)
    return variables
