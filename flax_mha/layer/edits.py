"""Change a model while it runs: edits of its named tensors, x ← keep·x + add.

    zero, mean, patch    Edit(keep=0, add=value)     at some places: keep and add are arrays
    steer                Edit(add=direction)
    scale, prune         Edit(keep=factor)

All are values of the same two arrays, so that one compiled program runs any of them, and both have
gradients: that with respect to `add` is the tensor's gradient.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from flax_mha.base import checks, shapes
from flax_mha.base.trees import combine, partition
from flax_mha.layer import points
from flax_mha.layer.points import COLLECTION, Edit, Path, Visit

__all__ = ["Edit", "Edits", "attach", "detach", "names", "stack", "sweep"]


class Edits(nnx.Variable[Any]):
    """The edits of an nnx layer, a dict by name; `nnx.DiffState(0, Edits)` selects them."""


class _Names(dict[str, jax.ShapeDtypeStruct]):
    """The points of a model by path, with shapes and dtypes. `print` shows a line for each."""

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
    visits = _trace(model, *args, **kwargs)
    variables = {} if isinstance(model, nnx.Module) else args[0]
    return _Names({"/".join(path): _whole(variables, path, x) for path, x in visits.items()})


def attach(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Attach edits to a model, in place of earlier ones, and check that a call uses each.

    `attach(linen_model, variables, edits, *inputs, **kwargs)` returns variables with the edits, in
    the collection `edits`. If a transformation passes only parameters, such as the model's own
    `nn.scan`, they are beside the layer's parameters instead: train and save the variables
    without them. `attach(nnx_model, edits, *inputs, **kwargs)` sets the layers' variables `edits`,
    and returns the model. The call is traced, not run.

    Args:
      model: a linen or nnx module.
      *args: the arguments above. `edits` are by path, as `names` has them, such as
        `{"layers_0/attention/attention_z": Edit(keep=0)}`, or nested. Under `nn.scan` an edit is a
        dict by layer, `{3: Edit(keep=0)}`, or has a leading axis of layers.
      **kwargs: more arguments of `apply`, or of the call.

    Raises:
      ValueError: if a path names no point, or an edit does not broadcast to its tensor.
      TypeError: if a value is not an `Edit`.
    """
    if isinstance(model, nnx.Module):
        return _attach_nnx(model, *args, **kwargs)
    variables, edits, *inputs = args
    variables = {name: x for name, x in variables.items() if name != COLLECTION}
    chosen = _flat(edits)
    visits = _trace(model, variables, *inputs, **kwargs)
    _check(chosen, visits, "points of the model")
    for path, edit in chosen.items():
        whole, rank = _whole(variables, path, visits[path]).shape, len(visits[path].tensor.shape)
        if len(whole) > rank:
            chosen[path] = _of_layers("/".join(path), edit, whole[0])
    _check_types(chosen)

    def store(outside: Mapping[Path, Edit], inside: Mapping[Path, Edit]) -> dict[str, Any]:
        parameters = traverse_util.flatten_dict(variables.get("params", {}))
        parameters = {path: x for path, x in parameters.items() if COLLECTION not in path[-2:-1]}
        parameters |= {(*path[:-1], COLLECTION, path[-1]): x for path, x in inside.items()}
        nested = (traverse_util.unflatten_dict(flat) for flat in (parameters, outside))
        return {**variables, **dict(zip(("params", COLLECTION), nested, strict=True))}

    stored = store(chosen, {})
    visits = _trace(model, stored, *inputs, **kwargs)
    lost = {path: edit for path, edit in chosen.items() if not visits[path].is_edited}
    if lost:
        stored = store({path: x for path, x in chosen.items() if path not in lost}, lost)
        visits = _trace(model, stored, *inputs, **kwargs)
        used = {path: visit for path, visit in visits.items() if visit.is_edited}
        _check(chosen, used, "points that the model's transformations reach")
    return stored


def detach(model: nnx.Module) -> None:
    """Remove the edits of all layers of an nnx model."""
    for _, layer in _layers(model):
        layer.edits = nnx.data(None)


def _attach_nnx(model: nnx.Module, edits: Any, *inputs: Any, **kwargs: Any) -> nnx.Module:
    detach(model)
    chosen = _flat(edits)
    _check(chosen, _trace(model, *inputs, **kwargs), "points of the model")
    _check_types(chosen)
    for path, layer in _layers(model):
        own = {point[-1]: edit for point, edit in chosen.items() if point[:-1] == path}
        if own:
            layer.edits = nnx.data(Edits(own))
    try:
        _trace(model, *inputs, **kwargs)
    except Exception:
        detach(model)
        raise
    return model


def _layers(model: nnx.Module) -> Iterator[tuple[Path, Any]]:
    """Return the attention layers of an nnx model, with their paths."""
    for path, module in nnx.iter_modules(model):
        if hasattr(module, COLLECTION) and hasattr(module, "_make_call"):
            yield tuple(map(str, path)), module


def _of_layers(name: str, edit: Any, num_layers: int) -> Edit:
    """Return an edit with a leading axis of layers, from one by layer."""
    if not isinstance(edit, Edit):
        return stack(edit, num_layers)
    if any(np.shape(x)[:1] != (num_layers,) for x in (edit.keep, edit.add)):
        raise ValueError(
            f"an edit of {name} must have a leading axis of the {num_layers} layers in `keep` and "
            f"`add`, got {np.shape(edit.keep)} and {np.shape(edit.add)}; give a dict by layer"
        )
    return edit


def stack(edits: Mapping[int, Edit], num_layers: int) -> Edit:
    """Return the edits of some layers as one with a leading axis of layers, neutral for others.

    Args:
      edits: the edits by layer.
      num_layers: the number of layers.
    """
    if not all(0 <= layer < num_layers for layer in edits):
        raise ValueError(f"edits must be of layers 0 to {num_layers - 1}, got {sorted(edits)}")
    heads = {edit.heads for edit in edits.values()}
    if len(heads) > 1:
        raise ValueError(f"edits of layers under scan must have the same heads, got {heads}")

    def join(field: str) -> jax.Array:
        neutral = getattr(Edit(), field)
        rows = [getattr(edits.get(layer), field, neutral) for layer in range(num_layers)]
        shape = jnp.broadcast_shapes(*map(np.shape, rows))
        rows = [shapes.lead(jnp.asarray(row, jnp.float32), len(shape)) for row in rows]
        return jnp.stack([jnp.broadcast_to(row, shape) for row in rows])

    return Edit(join("keep"), join("add"), *heads)


def sweep(
    fn: Callable[..., Any], edits: Any, *args: Any, batch_size: int | None = None
) -> Any:  # fmt: skip
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
    def run(one: Any) -> Any:
        return fn(combine(one, shared), *args)

    return jax.lax.map(run, edits, batch_size=batch_size)


def _trace(model: Any, *args: Any, **kwargs: Any) -> dict[Path, Visit]:
    """Return the points that a call of a model comes to."""
    visits: dict[Path, Visit] = {}
    if not isinstance(model, nnx.Module):
        mutable = nn.DenyList(("params", COLLECTION))
        with points.listing(visits, {}):
            jax.eval_shape(functools.partial(model.apply, mutable=mutable, **kwargs), *args)
        return visits
    definition, state = nnx.split(model)

    def call(state: Any, *inputs: Any) -> Any:
        copy = nnx.merge(definition, state)
        paths = {id(module): tuple(map(str, path)) for path, module in nnx.iter_modules(copy)}
        with points.listing(visits, paths):
            return copy(*inputs, **kwargs)

    jax.eval_shape(call, state, *args)
    return visits


def _whole(variables: Any, path: Path, visit: Visit) -> jax.ShapeDtypeStruct:
    """Return a point's tensor, with a leading axis of layers if its linen module is scanned."""
    parameters = variables.get("params", {})
    for name in path[:-1]:
        parameters = parameters.get(name, {})
    leaves = jax.tree.leaves({name: x for name, x in parameters.items() if name != COLLECTION})
    layers = np.shape(leaves[0])[: -len(visit.parameter) or None] if visit.parameter else ()
    return jax.ShapeDtypeStruct((*layers, *visit.tensor.shape), visit.tensor.dtype)


def _flat(edits: Mapping[str, Any], path: Path = ()) -> dict[Path, Any]:
    """Return edits by path as tuples, from a nested dict whose names may be paths."""
    flat: dict[Path, Any] = {}
    for name, value in edits.items():
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            flat |= _flat(value, (*path, *name.split("/")))
        else:
            flat[(*path, *name.split("/"))] = value
    return flat


def _check(edits: Mapping[Path, Any], visits: Mapping[Path, Any], rule: str) -> None:
    if unknown := ["/".join(path) for path in edits if path not in visits]:
        known = "\n  ".join("/".join(path) for path in visits) or "none"
        raise ValueError(f"edits must be of {rule}, got {unknown}; give some of\n  {known}")


def _check_types(edits: Mapping[Path, Any]) -> None:
    for path, edit in edits.items():
        if not isinstance(edit, Edit):
            raise TypeError(
                f"the edit of {'/'.join(path)} must be an Edit, or under nn.scan a dict of them by "
                f"layer, got {checks.describe(edit)}; give edits.Edit(keep=0), say"
            )
