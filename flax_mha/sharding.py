"""Logical axis names to mesh axes.

Arrays are described by logical names; one table of rules says which mesh axis each goes to:

| logical name | what it counts |
|---|---|
| `batch` | rows of the batch |
| `length` | positions of the sequence |
| `norm_length` | positions between the layers, for norms and residuals |
| `embed` | model features of a parameter (shard it for FSDP) |
| `heads`, `kv_heads` | query heads, key/value heads |
| `head_dim` | features within a head |
| `mlp`, `experts` | hidden features of the MLP, experts |
| `vocab` | rows of the token embedding, columns of the logits |
| `layers` | blocks stacked by scan |

The mesh is the ambient one (`jax.set_mesh`), the rules are Flax's (`nn.logical_axis_rules`):

>>> with jax.set_mesh(mesh), nn.logical_axis_rules(sharding.RULES):
...     variables = sharding.init(model, rng, x)  # every shard is born on its device
...     y = jax.jit(model.apply)(variables, x)
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax.core import meta
from flax.typing import Dtype, Initializer
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from flax_mha import inputs, mesh_axes
from flax_mha.mesh_axes import LogicalNames
from flax_mha.mesh_axes import varying as varying
from flax_mha.mesh_axes import zigzag as zigzag

HEADS, KV_HEADS = (("batch", "length", name, "head_dim") for name in ("heads", "kv_heads"))

RULES: tuple[tuple[str, str | None], ...] = (
    ("batch", "data"),  # data parallel
    ("heads", "model"),  # tensor parallel: each device computes whole heads
    ("kv_heads", "model"),
    ("mlp", "model"),
    ("experts", None),  # expert parallel: a mesh axis that divides no tokens
    ("vocab", "model"),
    ("embed", None),  # FSDP: the name of a mesh axis here spreads every parameter over it
    ("length", None),
    ("norm_length", None),  # sequence parallel: the axis of `heads` spreads norms and residuals too
    ("head_dim", None),
    ("layers", None),
)

# True while `of` traces: parameters then carry their logical names, whatever `partitioned` says.
# A JAX context, since a traced function is cached by the contexts it was traced in.
_naming = jax.make_user_context(False)
# True while `init` traces: activations are then laid out nowhere, for nobody will read them.
_initializing = jax.make_user_context(False)


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


def name(x: Any, names: LogicalNames) -> Any:
    """Gives a variable that is no parameter its logical axis names, while `of` reads them."""
    return Named(x, names) if _naming.value else x


def constrain(x: jax.Array, names: LogicalNames) -> jax.Array:
    """Lays x out as the rules say, on whatever mesh there is.

    With no mesh or no rules, and on Manual axes (inside `jax.shard_map`), nothing happens. On
    Auto axes it is a constraint for the compiler, on Explicit axes a reshard. An axis whose name
    has no rule stays as it is.

    Args:
      x: an array.
      names: a logical name or None for each of the last axes of x; further leading axes are
        left alone.

    Raises:
      ValueError: if the rules do not fit the mesh or the sizes of x.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not nn.get_logical_axis_rules() or _initializing.value:
        return x
    if mesh.empty:
        mesh_axes.warn_of_unseen_mesh()
        return x
    spec = mesh_axes.checked(inputs.array("x", x).shape, names, mesh)
    x = mesh_axes.reshard(x, spec)
    if mesh.auto_axes and any(part is not mesh_axes.UNCONSTRAINED for part in spec):
        x = mesh_axes.guide(x, mesh_axes.only(spec, mesh.auto_axes))
    return x


def spec(shape: Sequence[int], names: LogicalNames) -> PartitionSpec:
    """The mesh axes that the rules give each axis of an array.

    `UNCONSTRAINED` where they say nothing, and if there is nothing to divide: no mesh, one device,
    inside `jax.shard_map`.

    Args:
      shape: of the array.
      names: the logical names of its last axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = (*mesh.auto_axes, *mesh.explicit_axes)
    if math.prod(dict(mesh.shape)[axis] for axis in free) == 1:
        return PartitionSpec(*[mesh_axes.UNCONSTRAINED] * len(shape))
    if _initializing.value:
        return PartitionSpec(*[None] * len(shape))
    return mesh_axes.only(mesh_axes.checked(shape, names, mesh), free)


def local(
    fn: Callable[..., Any], names: Sequence[LogicalNames], outs: Any, *args: jax.Array
) -> Any:
    """fn(*args), each device on its own shards.

    Args:
      fn: a function of arrays, on Manual axes.
      names: the logical names of each of them.
      outs: a pair (shape, names) for its result, or a list of those.
      *args: the arrays.
    """
    mesh = jax.sharding.get_abstract_mesh()
    several = isinstance(outs, list)
    given = [(x.shape, n) for x, n in zip(args, names, strict=True)]
    # Without a batch an array has fewer axes than names.
    every = [
        (shape, n[max(len(n) - len(shape), 0) :])
        for shape, n in [*given, *(outs if several else [outs])]
    ]
    specs = [spec(shape, n) for shape, n in every]
    # An axis without a rule lies as the first of its name does, or, before the named, of its place.
    keys = [(*range(len(shape) - len(n)), *n) for shape, n in every]
    known: dict[Any, Any] = {}
    for x, key in reversed([*zip(args, keys, strict=False)]):
        known |= zip(key, mesh_axes.spec_of(x), strict=True)
    full = [
        mesh_axes.filled(spec, [known.get(name) for name in key])
        for spec, key in zip(specs, keys, strict=True)
    ]
    ins, rest = full[: len(args)], full[len(args) :]
    outs = rest if several else rest[0]
    return mesh_axes.over(
        fn, mesh_axes.manual(specs, mesh), ins, outs, *map(mesh_axes.reshard, args, ins)
    )


def platform() -> str:
    """The platform that what is traced here will run on.

    That of the ambient mesh's devices, which need not be those at hand: a program can be compiled
    for chips that are elsewhere. Without a mesh it is JAX's default.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def like(x: jax.Array, other: jax.Array) -> jax.Array:
    """Lays x out as other, of the same shape, where JAX asks for it: on Explicit axes."""
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return x
    return jax.sharding.reshard(x, mesh_axes.spec_of(other))


def auto(fn: Callable[..., Any], names: Any, *args: Any) -> Any:
    """fn(*args), laid out by names; what happens inside is left to the compiler on any mesh.

    On Explicit axes JAX asks of many operations (reshapes, gathers, products over a divided axis)
    where their results belong. Inside fn these axes are Auto, and `constrain` guides the compiler.

    Args:
      fn: a function that closes over no array of JAX.
      names: the logical names of its result, in the form of its result. An axis without a rule
        lies as that axis of the first array does.
      *args: trees of arrays.
    """
    mesh = jax.sharding.get_abstract_mesh()

    def run(*args: Any) -> Any:
        return jax.tree.map(lambda n, x: constrain(x, n), names, fn(*args), is_leaf=_is_names)

    if not mesh.explicit_axes:
        return run(*args)
    whole = _initializing.value or not nn.get_logical_axis_rules()
    arrays = [x for x in jax.tree.leaves(args) if isinstance(x, jax.Array)]
    if whole and any(any(mesh_axes.spec_of(x)) for x in arrays):
        raise ValueError(
            f"arrays divided over the Explicit mesh axes {mesh.explicit_axes} need rules that say "
            f"what is; wrap in `with nn.logical_axis_rules(sharding.RULES)`"
        )

    # What are no arrays of JAX pass by themselves.
    leaves, tree = jax.tree.flatten(args)
    given = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]

    def spec(n: LogicalNames, x: jax.ShapeDtypeStruct) -> PartitionSpec:
        if whole:
            return PartitionSpec()
        first = leaves[given[0]]
        alike = zip(mesh_axes.spec_of(first), first.shape, x.shape, strict=False)
        own = [axes if size == wanted else None for axes, size, wanted in alike]
        spec = mesh_axes.only(mesh_axes.checked(x.shape, n, mesh), mesh.explicit_axes)
        return mesh_axes.filled(spec, own)

    def of_arrays(arrays: Sequence[Any], call: Callable[..., Any]) -> Any:
        filled = dict(zip(given, arrays, strict=True))
        return call(*jax.tree.unflatten(tree, [filled.get(i, x) for i, x in enumerate(leaves)]))

    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        plain = [jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype) for i in given]
        shapes = jax.eval_shape(lambda *x: of_arrays(x, fn), *plain)
    specs = jax.tree.map(spec, names, shapes, is_leaf=_is_names)
    inside = jax.sharding.auto_axes(
        lambda *x: of_arrays(x, run), axes=mesh.explicit_axes, out_sharding=specs
    )
    if mesh.manual_axes:
        # Inside `jax.shard_map` over other axes, JAX refuses residuals of what is Auto in it; and
        # does not run it outside jit.
        inside = jax.checkpoint(jax.jit(inside))
    return inside(*(leaves[i] for i in given))


def _is_names(x: Any) -> bool:
    return isinstance(x, tuple) and all(n is None or isinstance(n, str) for n in x)


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
        spec = mesh_axes.checked(x.shape, filled, mesh.abstract_mesh)
        return NamedSharding(mesh, mesh_axes.filled(spec))

    return jax.tree.map(
        spec, nn.get_partition_spec(abstract), meta.unbox(abstract),
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )  # fmt: skip


def init(model: nn.Module, rngs: Any, *args: Any, **kwargs: Any) -> Any:
    """`model.init`, every shard born on its device; without a mesh `jax.jit(model.init)`."""

    def create(rngs: Any, *args: Any) -> Any:
        with _initializing(True):
            return model.init(rngs, *args, **kwargs)

    if jax.sharding.get_mesh().empty:
        return jax.jit(create)(rngs, *args)
    shardings = of(create, rngs, *args)
    if explicit := jax.sharding.get_abstract_mesh().explicit_axes:
        # Else each device draws whole parameters, rounded otherwise, and keeps its shard.
        specs = jax.tree.map(lambda at: mesh_axes.only(at.spec, explicit), shardings)
        create = jax.sharding.auto_axes(create, axes=explicit, out_sharding=specs)
    return jax.jit(create, out_shardings=shardings)(rngs, *args)
