"""Logical axis names to mesh axes.

Arrays are described by logical names; one table of rules says which mesh axis each goes to:

| logical name | what it counts |
|---|---|
| `batch` | rows of the batch |
| `length` | positions of the sequence |
| `embed` | model features of a parameter (shard it for FSDP) |
| `heads`, `kv_heads` | query heads, key/value heads |
| `head_dim` | features within a head |
| `mlp` | hidden features of the MLP |
| `vocab` | rows of the token embedding, columns of the logits |
| `layers` | blocks stacked by scan |

The mesh is the ambient one (`jax.set_mesh`), the rules are Flax's (`nn.logical_axis_rules`):

>>> with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
...     variables = sharding.init(model, rng, x)  # every shard is born on its device
...     y = jax.jit(model.apply)(variables, x)
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax.core import meta
from flax.typing import Dtype, Initializer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

LogicalNames = tuple[str | None, ...]

RULES: tuple[tuple[str, str | None], ...] = (
    ("batch", "data"),  # data parallel
    ("heads", "model"),  # tensor parallel: each device computes whole heads
    ("kv_heads", "model"),
    ("mlp", "model"),
    ("vocab", "model"),
    ("embed", None),  # FSDP: the name of a mesh axis here spreads every parameter over it
    ("length", None),
    ("head_dim", None),
    ("layers", None),
)

# True while `of` traces: parameters then carry their logical names, whatever `partitioned` says.
# A JAX context, since a traced function is cached by the contexts it was traced in.
_naming = jax.make_user_context(False)


class Named(nn.LogicallyPartitioned):
    """A parameter's value with its logical axis names."""

    def unbox(self, apply_constraint: bool = True) -> Any:
        """The value as it is: Flax's own box would constrain it, which Explicit axes refuse."""
        del apply_constraint
        return self.value


def named(init: Initializer, names: LogicalNames, partitioned: bool = False) -> Initializer:
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


def constrain(x: jax.Array, names: LogicalNames) -> jax.Array:
    """Lays x out as the rules say, on whatever mesh there is.

    With no mesh or no rules, and on Manual axes (inside `jax.shard_map`), nothing happens. On
    Auto axes it is a constraint for the compiler, on Explicit axes a reshard.

    Args:
      x: an array.
      names: a logical name or None for each of the last axes of x; further leading axes are
        left alone.
    """
    mesh = jax.sharding.get_abstract_mesh()
    rules = nn.get_logical_axis_rules()
    if mesh.empty or not rules or all(kind == AxisType.Manual for kind in mesh.axis_types):
        return x
    names = (None,) * (x.ndim - len(names)) + names
    spec = nn.logical_to_mesh_axes(names, rules)
    if all(kind == AxisType.Explicit for kind in mesh.axis_types):
        return jax.sharding.reshard(x, spec)
    return jax.lax.with_sharding_constraint(x, spec)


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
        raise ValueError(
            "shardings need a mesh, and none is set; wrap in `with jax.set_mesh(mesh)`"
        )
    with _naming(True):
        abstract = jax.eval_shape(fn, *args)
    specs = nn.logical_to_mesh(nn.get_partition_spec(abstract), nn.get_logical_axis_rules())
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )


def init(model: nn.Module, rngs: Any, *args: Any, **kwargs: Any) -> Any:
    """`model.init`, with every shard born on its device.

    Without an ambient mesh this is `jax.jit(model.init)`.
    """

    def create(rngs: Any, *args: Any) -> Any:
        return model.init(rngs, *args, **kwargs)

    if jax.sharding.get_mesh().empty:
        return jax.jit(create)(rngs, *args)
    return jax.jit(create, out_shardings=of(create, rngs, *args))(rngs, *args)
