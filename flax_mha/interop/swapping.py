"""Replacement of Flax's attention layers in an existing model.

>>> fast = swap(model)
>>> fast.apply(variables, x)  # the same parameters, the same outputs
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import flax.linen as nn
from flax import nnx

import flax_mha.nnx
from flax_mha.base import checks
from flax_mha.linen import MultiHeadAttention, MultiHeadDotProductAttention

Model = TypeVar("Model", bound=nn.Module | nnx.Module)

_FLAX_CALL = inspect.unwrap(nn.MultiHeadDotProductAttention.__call__)


def swap(model: Model, **fields: Any) -> Model:
    """Return a model whose Flax attention layers are computed by this package.

    Code and parameters stay the same. Each `nn.MultiHeadDotProductAttention`, also as the base of
    `nn.SelfAttention` and of other classes, is computed by a `flax_mha.MultiHeadAttention` with
    the same fields. Each `nnx.MultiHeadAttention`, but no subclass, becomes one of `flax_mha.nnx`.
    Dropout draws other weights, and decoding uses this package's cache, which `init` (in nnx
    `init_cache`) creates as before.

    Args:
      model: a linen or nnx module.
      **fields: more fields for each layer, such as `kernel="blockwise"`.

    Returns:
      In linen, a module of a subclass of the model's class, with the same fields; in nnx, a model
      that shares its parameters with the given one.

    Raises:
      TypeError: if the model is no module, or if a layer has user-defined matmuls or promotions
        such as `qkv_dot_general` or `qkv_promote_dtype`. In linen the first call raises it.
    """
    if isinstance(model, nnx.Module):
        return cast(Model, nnx.recursive_map(functools.partial(_convert_nnx, fields), model))
    if isinstance(model, nn.Module):
        return _intercept_linen(model, fields)
    raise TypeError(
        f"model must be a module of linen or nnx, got {checks.describe(model)}; give Model()"
    )


def _intercept_linen(model: Any, fields: dict[str, Any]) -> Any:
    """Return a copy of the model, of a subclass whose methods intercept calls of Flax's layer."""
    cls = type(model)

    def intercept(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def intercepted(*args: Any, **kwargs: Any) -> Any:
            with nn.intercept_methods(functools.partial(_call, fields)):
                return method(*args, **kwargs)

        return intercepted

    public = [name for name in dir(cls) if name == "__call__" or not hasattr(nn.Module, name)]
    methods = [name for name in public if inspect.isfunction(inspect.getattr_static(cls, name))]
    # These two also call functions that are no methods of the model: apply(…, method=function).
    methods += ["apply", "init_with_output"]
    entries = {name: intercept(getattr(cls, name)) for name in methods}
    subclass = type(cls.__name__, (cls,), entries | {"__module__": cls.__module__})
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    return subclass(**{name: getattr(model, name) for name in names if name != "parent"})


class _Substitute(MultiHeadDotProductAttention):
    """A layer in the scope of the Flax layer that it replaces."""

    @nn.compact
    def call_in_place(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer without `__call__`, whose outputs Flax would capture twice."""
        return cast(Any, MultiHeadAttention.__call__).__wrapped__(self, *args, **kwargs)


def _call(fields: dict[str, Any], call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Call the substitute of a Flax layer in its scope, and any other method as it is."""
    flax_layer = context.module
    if inspect.unwrap(context.orig_method.func) is not _FLAX_CALL:
        return call(*args, **kwargs)
    options = _options(flax_layer, nn.MultiHeadDotProductAttention) | fields
    return _Substitute(**options, parent=flax_layer.scope).call_in_place(*args, **kwargs)


def _convert_nnx(fields: dict[str, Any], path: Any, node: Any) -> Any:
    """Return a layer of `flax_mha.nnx` with the node's parameters, if it is a Flax layer."""
    if type(node) is not nnx.MultiHeadAttention:
        return node
    options = _options(node, nnx.MultiHeadAttention) | fields
    cls = flax_mha.nnx.MultiHeadAttention
    # Allocate no parameters, as the node's take their place.
    layer = nnx.eval_shape(lambda: cls(**options, rngs=nnx.Rngs(0)))
    for name in ("query", "key", "value", "out"):
        linear = getattr(node, name)
        if type(linear) is nnx.LinearGeneral:
            projection = getattr(layer, name)
            projection.kernel, projection.bias = linear.kernel, linear.bias
        else:
            setattr(layer, name, linear)
    for name in ("query_ln", "key_ln", "rngs"):
        setattr(layer, name, getattr(node, name))
    return layer


def _options(layer: Any, cls: Any) -> dict[str, Any]:
    """Return a Flax layer's fields but those of the defaults of its class, which are ours too."""
    parameters = inspect.signature(cls.__init__).parameters
    defaults = {name: p.default for name, p in parameters.items()}
    values = {name: getattr(layer, name, default) for name, default in defaults.items()}
    others = ("self", "parent", "name", "rngs")
    return {n: x for n, x in values.items() if n not in others and x is not defaults[n]}
