"""Change a model while it runs, by edits of its named tensors: x ← fn(keep·x + add).

One compiled program runs all edits of one shape. The gradient of `add` is the tensor's.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict

from flax_mha.base import checks, shapes
from flax_mha.base.trees import combine, partition
from flax_mha.layer.settings import Settings
from flax_mha.taps.sown import sown_by, split, values
from flax_mha.taps.tap import COLLECTION, Edit, at_tensor

__all__ = ["Edit", "Edits", "attach", "attention_layers", "detach", "names", "sweep", "values"]
__dir__ = __all__.copy


# Tensors by path, each with the sizes of the axes that scans add, and True if it is edited.
Tensors: TypeAlias = dict[str, tuple[jax.ShapeDtypeStruct, shapes.Shape, bool]]


class Edits(nnx.Variable[Any]):
    """An array of an edit of an nnx layer; `nnx.DiffState(0, Edits)` selects all of them."""


def names(model: Any, *args: Any, **kwargs: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Trace a call, and return the tensors that edits can change by path, as shapes and dtypes.

    Under `nn.scan` a tensor has a leading axis of layers.

    Args:
      model: a linen or nnx module.
      *args: arguments of the call; for linen, the variables first.
      **kwargs: more arguments of `apply`, or of the call.
    """
    return {path: x for path, (x, *_) in _trace(model, *args, **kwargs).items()}


def _trace(model: Any, *args: Any, **kwargs: Any) -> Tensors:
    """Trace a call, and return its tensors."""
    tensors: Tensors = {}
    parameters: Any = {}

    def visit(module: Any, name: str, x: Any, is_edited: bool) -> None:
        path, layers = getattr(module, "path", ()), ()
        if isinstance(module, nn.Module):
            whole = functools.reduce(lambda x, part: x.get(part, {}), path, parameters)
            # A scan slices the parameters.
            leaves = map(jax.tree.leaves, (whole, module.variables.get("params", {})))
            for outer, inner in zip(*leaves, strict=False):
                layers = outer.shape[: outer.ndim - inner.ndim]
        x = jax.ShapeDtypeStruct((*layers, *x.shape), x.dtype)
        tensors["/".join((*path, name))] = x, layers, is_edited

    if isinstance(model, nn.Module):
        # JAX's caches keep `visit`, which must not keep arrays.
        parameters = jax.eval_shape(dict, args[0].get("params", {}))
    root, *inputs = split(model, *args)
    with at_tensor(visit):
        jax.eval_shape(functools.partial(sown_by, root, **kwargs), *inputs)
    return tensors


def attach(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Attach edits to a model, in place of earlier ones. A trace checks that a call uses each.

    `attach(linen_model, variables, edits, *inputs)` returns variables with the collection `edits`.
    Train and save the variables without it. `attach(nnx_model, edits, *inputs)` sets `edits` of
    the layers, and returns the model.

    Args:
      model: a linen or nnx module.
      *args: the arguments above. `edits` are by path, such as `{"layers_0/resid_pre": Edit(0)}`.
        Under `nn.scan` give a dict by layer, `{3: Edit(keep=0)}`, or an edit whose arrays have a
        leading axis of layers.
      **kwargs: more arguments of `apply`, or of the call.

    Raises:
      ValueError: if a path names no tensor, or an edit does not broadcast to its tensor.
      TypeError: if a value is not an `Edit`.
    """
    is_nnx = isinstance(model, nnx.Module)
    variables, edits, *inputs = (None, *args) if is_nnx else args

    def placed(chosen: Any) -> tuple[Any, ...]:
        """Return the model and its variables with edits."""
        if is_nnx:
            copy = nnx.clone(model)
            _set(copy, chosen)
            return (copy,)
        return model, {**variables, COLLECTION: unflatten_dict(chosen, sep="/")}

    chosen = _resolve(edits, _trace(*placed({}), *inputs, **kwargs))
    changed = placed(chosen)
    tensors = _trace(*changed, *inputs, **kwargs)
    if lost := [path for path in chosen if not tensors[path][-1]]:
        raise ValueError(
            f"transformations must pass edits to {lost}, got none there; give nn.scan "
            f"variable_axes={{'edits': 0}}, say"
        )
    if is_nnx:
        _set(model, chosen)
        return model
    return changed[1]


def detach(model: nnx.Module) -> None:
    """Remove the edits of all layers of an nnx model."""
    _set(model, {})


@functools.partial(jax.jit, static_argnums=0, static_argnames="batch_size")
def sweep(fn: Callable[..., Any], edits: Any, *args: Any, batch_size: int | None = None) -> Any:
    """Return fn(edits, *args) for many edits, stacked, computed by one compiled program.

    Args:
      fn: a function of edits and the other arguments.
      edits: a tree whose arrays have a leading axis. Numbers are the same for all edits.
      *args: arguments that are the same for all edits.
      batch_size: the number of edits that are computed together (default: one).
    """
    shared, several = partition(edits, lambda x: jnp.ndim(x) == 0)
    return jax.lax.map(lambda x: fn(combine(x, shared), *args), several, batch_size=batch_size)


def _resolve(edits: Any, tensors: Tensors) -> dict[str, Edit]:
    """Check edits, and return them by path, with one edit for all layers of a scan."""
    chosen: dict[str, Any] = {**edits}
    for path, edit in edits.items():
        if path not in tensors:
            raise ValueError(
                f"edits must be of tensors of the model, got {path!r}; "
                f"{checks.nearest(path, tensors)}; flax_mha.edits.names lists them"
            )
        layers = tensors[path][1][:1]
        if layers and isinstance(edit, Mapping):
            edit = _stack(edit, *layers)
        if not isinstance(edit, Edit):
            raise TypeError(
                f"the edit of {path} must be an Edit, or under nn.scan a dict of them by layer, "
                f"got {checks.describe(edit)}; give edits.Edit(keep=0), say"
            )
        if layers:  # Numbers are of all layers.
            edit = jax.tree.map(lambda x, n=layers: x if np.ndim(x) else jnp.full(n, x), edit)
        chosen[path] = edit
    return chosen


def _stack(edits: Mapping[int, Edit], num_layers: int) -> Edit:
    """Return edits as one with a leading axis of layers, neutral for layers without any."""

    def join(*rows: Any) -> jax.Array:
        return jnp.stack(jnp.broadcast_arrays(*(jnp.asarray(row, jnp.float32) for row in rows)))

    neutral = Edit(heads=next(iter(edits.values())).heads)
    rows = [edits.get(n, neutral) for n in range(num_layers)]
    if edits.keys() - {*range(num_layers)} or len({(row.heads, row.fn) for row in rows}) > 1:
        raise ValueError(
            f"edits under scan must be of layers 0 to {num_layers - 1}, with the same heads, and "
            f"one fn for all layers, got {edits}; give each the same fn, and numbers in args"
        )
    stacked: Edit = jax.tree.map(join, *rows)
    return stacked


def _set(model: nnx.Module, edits: Mapping[str, Edit]) -> None:
    """Set the edits of an nnx model, in place of earlier ones."""
    for path, layer in attention_layers(model):
        prefix = "".join(f"{name}/" for name in path)
        own = {
            name.removeprefix(prefix): jax.tree.map(lambda x: Edits(jnp.asarray(x)), edit)
            for name, edit in edits.items()
            if name.rpartition("/")[0] == prefix[:-1]
        }
        layer.edits = nnx.data(own or None)


def attention_layers(model: nnx.Module) -> list[tuple[tuple[str, ...], Any]]:
    """Return the attention layers of an nnx model, each with its path."""
    return [
        (tuple(map(str, path)), x) for path, x in nnx.iter_modules(model)
        if isinstance(getattr(x, "config", None), Settings)
    ]  # fmt: skip
