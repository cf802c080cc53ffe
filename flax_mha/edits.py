"""Change a model while it runs: edits of its named tensors, x ← fn(keep·x + add).

Edits without `fn` are values of the same two arrays, so one compiled program runs any of them. Both
arrays have gradients: that of `add` is the tensor's gradient.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from flax_mha.base import checks, shapes
from flax_mha.base.trees import combine, partition
from flax_mha.layer.settings import Settings
from flax_mha.taps.contexts import visitor
from flax_mha.taps.edit import Edit
from flax_mha.taps.tap import COLLECTION

__all__ = ["Edit", "Edits", "attach", "attention_layers", "detach", "names", "sweep", "values"]
__dir__ = __all__.copy


class Edits(nnx.Variable[Any]):
    """An array of an edit of an nnx layer; `nnx.DiffState(0, Edits)` selects all of them."""


class _Names(dict[str, jax.ShapeDtypeStruct]):
    """The points of a model by path, with shapes and dtypes. `print` shows a line for each.

    Attributes:
      layers: the sizes of the leading axes that a scan adds, by path.
      edited: the paths that have an edit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers: dict[str, shapes.Shape] = {}
        self.edited: set[str] = set()

    def __str__(self) -> str:
        width = max((len(name) for name in self), default=0)
        return "\n".join(f"{name:{width}}  {x.dtype}{[*x.shape]}" for name, x in self.items())


def names(model: Any, *args: Any, **kwargs: Any) -> _Names:
    """Return the points of a model by path, found by tracing a call.

    Args:
      model: a linen or nnx module.
      *args: arguments of the call; for linen, the variables first. Under `nn.scan` a point has a
        leading axis of layers.
      **kwargs: more arguments of `apply`, or of the call.
    """
    points = _Names()
    parameters: Any = {}

    def visit(module: Any, name: str, x: Any, is_edited: bool) -> None:
        layers: shapes.Shape = ()
        if isinstance(module, nn.Module):
            whole = functools.reduce(lambda x, part: x.get(part, {}), module.path, parameters)
            # A scan slices the parameters.
            leaves = map(jax.tree.leaves, (whole, module.variables.get("params", {})))
            for outer, inner in [*zip(*leaves, strict=False)][:1]:
                layers = np.shape(outer)[: np.ndim(outer) - np.ndim(inner)]
        path = "/".join((*getattr(module, "path", ()), name))
        points[path] = jax.ShapeDtypeStruct((*layers, *x.shape), x.dtype)
        points.layers[path] = layers
        if is_edited:
            points.edited.add(path)

    if isinstance(model, nnx.Module):
        definition, state = nnx.split(model)

        def call(state: Any, *inputs: Any) -> Any:
            copy: Any = nnx.merge(definition, state)
            for path, layer in attention_layers(copy):
                layer.path = path
            return copy(*inputs, **kwargs)

        args = (state, *args)
    else:
        # JAX's caches keep `visit`, which must not keep arrays.
        parameters = jax.eval_shape(dict, args[0].get("params", {}))
        mutable = nn.DenyList(("params", COLLECTION))
        call = functools.partial(model.apply, mutable=mutable, **kwargs)
    with visitor(visit):
        jax.eval_shape(call, *args)
    return points


class _Values(dict[str, Any]):
    """The values of a run by path. A wrong path is an error that names the nearest."""

    def __missing__(self, path: str) -> Any:
        raise KeyError(f"{path!r} is no value of the run; {checks.nearest(path, self)}")


def values(sown: Any) -> dict[str, Any]:
    """Return the values that a run sowed by path, under the names of `names`.

    >>> _, sown = model.apply(variables, x, mutable="intermediates")
    >>> cache = edits.values(sown)
    >>> z = cache["layers_0/attention/attention_z"]

    Args:
      sown: the collection `intermediates`, or the collections of the run; for nnx, the state of
        `nnx.pop(model, nnx.Intermediate)`. A module that was called several times has a tuple.
    """
    tree = nnx.to_pure_dict(sown) if isinstance(sown, nnx.State) else sown
    flat = flatten_dict(tree.get("intermediates", tree), sep="/")
    is_one = {path: isinstance(x, tuple) and len(x) == 1 for path, x in flat.items()}
    return _Values({path: x[0] if is_one[path] else x for path, x in flat.items()})


def attach(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Attach edits to a model, in place of earlier ones, and check that a call uses each.

    `attach(linen_model, variables, edits, *inputs)` returns variables with the edits, in the
    collection `edits`. If a transformation passes only parameters, such as the model's own
    `nn.scan`, they are beside the layer's parameters instead: train and save the variables without
    them. `attach(nnx_model, edits, *inputs)` sets the layers' variables `edits`, and returns the
    model. The call is traced, not run.

    Args:
      model: a linen or nnx module.
      *args: the arguments above. `edits` are by path, such as `{"layers_0/resid_pre": Edit(0)}`,
        or nested. Under `nn.scan` an edit is a dict by layer, `{3: Edit(keep=0)}`, or has a leading
        axis of layers.
      **kwargs: more arguments of `apply`, or of the call.

    Raises:
      ValueError: if a path names no point, or an edit does not broadcast to its tensor.
      TypeError: if a value is not an `Edit`.
    """
    lost: set[str] = set()
    if isinstance(model, nnx.Module):
        edits, *inputs = args
        trial = nnx.clone(model)
        detach(trial)
        chosen = _resolve(edits, names(trial, *inputs, **kwargs))
        _set(trial, chosen)
        lost = {*chosen} - names(trial, *inputs, **kwargs).edited
        if not lost:
            _set(model, chosen)
            return model
    else:
        variables, edits, *inputs = args
        variables = _store(variables, {}, ())
        chosen = _resolve(edits, names(model, variables, *inputs, **kwargs))
        for _ in range(2):  # First in the collection, then some beside parameters.
            stored = _store(variables, chosen, lost)
            lost = {*chosen} - names(model, stored, *inputs, **kwargs).edited
            if not lost:
                return stored
    raise ValueError(
        f"edits must be of points that the model's transformations reach, got {sorted(lost)}; "
        f"leave them out"
    )


def detach(model: nnx.Module) -> None:
    """Remove the edits of all layers of an nnx model."""
    _set(model, {})


def sweep(fn: Callable[..., Any], edits: Any, *args: Any, batch_size: int | None = None) -> Any:
    """Return fn(edits, *args) of many edits, computed by one compiled program.

    Args:
      fn: a function of edits, and of the other arguments. Its results are stacked.
      edits: a tree whose arrays have a leading axis, such as edits by path. Numbers are shared.
      *args: other arguments, the same for all.
      batch_size: the number of edits that are computed together (default: one).
    """
    shared, several = partition(edits, lambda x: np.ndim(x) == 0)
    if not jax.tree.leaves(several):
        raise ValueError("edits must have an array with a leading axis, got none; give one")
    return _sweep(fn, batch_size, several, shared, *args)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sweep(
    fn: Callable[..., Any], batch_size: int | None, edits: Any, shared: Any, *args: Any
) -> Any:
    return jax.lax.map(lambda one: fn(combine(one, shared), *args), edits, batch_size=batch_size)


def _resolve(edits: Any, points: _Names) -> dict[str, Edit]:
    """Check edits, and return them by path, those of layers under a scan as one."""
    chosen: dict[str, Any] = flatten_dict(
        edits, sep="/", is_leaf=lambda _, x: not all(isinstance(key, str) for key in x)
    )
    if unknown := [path for path in chosen if path not in points]:
        raise ValueError(
            f"edits must be of points of the model, got {unknown}; for {unknown[0]!r} "
            f"{checks.nearest(unknown[0], points)}; flax_mha.edits.names lists them"
        )
    for path, edit in chosen.items():
        layers = points.layers[path]
        parts = edit if layers and isinstance(edit, Mapping) else {0: edit}
        if not all(isinstance(part, Edit) for part in parts.values()):
            raise TypeError(
                f"the edit of {path} must be an Edit, or under nn.scan a dict of them by layer, "
                f"got {checks.describe(edit)}; give edits.Edit(keep=0), say"
            )
        if parts is edit:
            chosen[path] = _stack(edit, layers[0])
        elif layers and any(np.shape(x)[:1] != layers[:1] for x in (edit.keep, edit.add)):
            raise ValueError(
                f"an edit of {path} must have a leading axis of the {layers[0]} layers in `keep` "
                f"and `add`, got {np.shape(edit.keep)} and {np.shape(edit.add)}; give a dict by "
                f"layer"
            )
    return chosen


def _stack(edits: Mapping[int, Edit], num_layers: int) -> Any:
    """Return the edits of some layers as one with a leading axis of layers, neutral for others."""
    if not all(layer in range(num_layers) for layer in edits):
        raise ValueError(f"edits must be of layers 0 to {num_layers - 1}, got {sorted(edits)}")
    heads = {edit.heads for edit in edits.values()}
    if len(heads) > 1:
        raise ValueError(f"edits of layers under scan must have the same heads, got {heads}")
    functions = {edits[layer].fn if layer in edits else None for layer in range(num_layers)}
    if len(functions) > 1:
        raise ValueError(
            f"edits of layers under scan, which run one program, must have one fn for all "
            f"{num_layers} layers, got {len(functions)}; give each layer the same function, and "
            f"numbers in args"
        )
    neutral = Edit(heads=heads.pop())

    def join(*rows: Any) -> jax.Array:
        return jnp.stack(jnp.broadcast_arrays(*(jnp.asarray(row, jnp.float32) for row in rows)))

    return jax.tree.map(join, *(edits.get(layer, neutral) for layer in range(num_layers)))


def _store(
    variables: Mapping[str, Any], edits: Mapping[str, Edit], inside: Collection[str]
) -> dict[str, Any]:
    """Return variables with these edits alone, at the paths `inside` beside the parameters."""
    flat = flatten_dict(variables.get("params", {}), sep="/")
    parameters = {path: x for path, x in flat.items() if not isinstance(x, Edit)}
    for path in inside:
        module, slash, name = path.rpartition("/")
        parameters[f"{module}{slash}{COLLECTION}/{name}"] = edits[path]
    outside = {path: edit for path, edit in edits.items() if path not in inside}
    nested = {"params": parameters, COLLECTION: outside}
    return {**variables, **{name: unflatten_dict(x, sep="/") for name, x in nested.items()}}


def _set(model: nnx.Module, edits: Mapping[str, Edit]) -> None:
    """Set the edits of an nnx model, in place of earlier ones."""
    for path, layer in attention_layers(model):
        parts = {name.rpartition("/"): edit for name, edit in edits.items()}
        own = {name: edit for (module, _, name), edit in parts.items() if module == "/".join(path)}
        layer.edits = nnx.data(jax.tree.map(lambda x: Edits(jnp.asarray(x)), own) or None)


def attention_layers(model: nnx.Module) -> list[tuple[tuple[str, ...], Any]]:
    """Return the attention layers of an nnx model, each with its path.

    >>> for path, layer in attention_layers(model):
    ...     layer.capture = flax_mha.Capture(("weights",))
    """
    return [
        (tuple(map(str, path)), x) for path, x in nnx.iter_modules(model)
        if isinstance(getattr(x, "config", None), Settings)
    ]  # fmt: skip
