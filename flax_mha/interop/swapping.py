"""Replacement of Flax's attention layers in an existing model.

>>> fast = swap(model)
>>> fast.apply(variables, x)  # the same parameters, the same outputs
"""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import flax.linen as nn
import jax
from flax import nnx

import flax_mha.nnx
from flax_mha.base import checks
from flax_mha.interop.contexts import within
from flax_mha.linen import MultiHeadDotProductAttention

Model = TypeVar("Model", bound=nn.Module | nnx.Module)

# Keeps the traces of `nn.jit` in models apart.
_swapping = jax.make_user_context(None)


def swap(model: Model, **fields: Any) -> Model:
    """Return a model whose Flax attention layers are computed by this package.

    Code and parameters stay the same. Dropout draws other weights, and decoding uses this package's
    cache. A warning names subclasses of Flax's layer that stay: those with their own `__call__`,
    and all of nnx. Calls of Flax's `dot_product_attention` stay too.

    Args:
      model: a linen or nnx module.
      **fields: more fields for each layer, such as `kernel="blockwise"`.

    Returns:
      An instance of the same class, equal for equal models of linen. A model of nnx shares its
      parameters.

    Raises:
      TypeError: if the model is no module, or a layer has its own matmuls, such as
        `qkv_dot_general` (in linen, at the first call).
    """
    if isinstance(model, nnx.Module):
        return cast(Model, nnx.recursive_map(functools.partial(_convert_nnx, fields), model))
    if isinstance(model, nn.Module):
        return within(model, _swapped, *sorted(fields.items()))
    raise TypeError(
        f"model must be a module of linen or nnx, got {checks.describe(model)}; give Model()"
    )


class _Layer(MultiHeadDotProductAttention):
    """Our layer in the place of Flax's, whose output Flax captures already."""

    @nn.nowrap
    def sow(self, col: str, name: str, value: Any, **options: Any) -> bool:  # type: ignore[override]
        return name != "__call__" and super().sow(col, name, value, **options)


@contextlib.contextmanager
def _swapped(cls: Any, *fields: tuple[str, Any]) -> Iterator[None]:
    """Intercept calls of Flax's layer."""
    key = cls if fields else True
    if _swapping.value is key:  # A method that another one of the model calls.
        yield
        return
    with _swapping(key), nn.intercept_methods(functools.partial(_call, dict(fields), [])):
        yield


def _call(fields: Any, swapped: list[Any], call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Compute calls of Flax's layers, which are added to `swapped`, and run others."""
    module, method, cls = context.module, context.orig_method.func, nn.MultiHeadDotProductAttention
    if context.method_name != "__call__":
        return call(*args, **kwargs)
    if (method.__module__, method.__qualname__) == (cls.__module__, f"{cls.__name__}.__call__"):
        swapped.append(module)
        options = _options(module, cls) | fields
        return _Layer(**options | {"parent": module.scope, "name": None})(*args, **kwargs)
    if isinstance(module, nnx.bridge.ToLinen):
        convert = functools.partial(_convert_nnx, fields)
        make = lambda *own, **more: nnx.recursive_map(convert, module.nnx_class(*own, **more))  # noqa: E731
        return method(module.clone(parent=module.scope, nnx_class=make), *args, **kwargs)
    output = call(*args, **kwargs)
    if isinstance(module, cls) and not any(layer is module for layer in swapped):
        _warn(type(module).__name__, getattr(module.scope, "path", ()))
    return output


def _convert_nnx(fields: Any, path: Any, node: Any) -> Any:
    """Return a layer of `flax_mha.nnx` with the node's parameters, if it is a Flax layer."""
    if not isinstance(node, nnx.Module) or isinstance(node, flax_mha.nnx.MultiHeadAttention):
        return node
    if type(node) is not nnx.MultiHeadAttention:
        if isinstance(node, nnx.MultiHeadAttention):
            _warn(type(node).__name__, path)
        for name, value in [*vars(node).items()]:
            if isinstance(value, nn.Module):  # For example in `nnx.bridge.ToNNX`.
                setattr(node, name, swap(value, **fields))
        return node
    cls = flax_mha.nnx.MultiHeadAttention
    options = _options(node, nnx.MultiHeadAttention) | fields
    # Allocate no parameters, as the node's take their place.
    layer = nnx.eval_shape(lambda: cls(**options | {"rngs": nnx.Rngs(0)}))
    for name in ("query", "key", "value", "out", "query_ln", "key_ln", "rngs"):
        child = getattr(node, name)
        if type(child) is nnx.LinearGeneral:
            projection = getattr(layer, name)
            projection.kernel, projection.bias = child.kernel, child.bias
        else:
            setattr(layer, name, child)
    return layer


def _options(layer: Any, cls: Any) -> dict[str, Any]:
    """Return the fields of a Flax layer that differ from its class' defaults, which are ours."""
    parameters = inspect.signature(cls.__init__).parameters
    defaults = {name: p.default for name, p in parameters.items()}
    values = {name: getattr(layer, name, default) for name, default in defaults.items()}
    others = ("self", "parent", "name", "rngs")
    return {n: x for n, x in values.items() if n not in others and x is not defaults[n]}


def _warn(cls: str, path: tuple[Any, ...]) -> None:
    """Warn of a subclass of Flax's layer that stays."""
    where = f"{cls} at '{'/'.join(map(str, path))}'"
    checks.warn(
        f"swap leaves a subclass of Flax's layer in {where}; call flax_mha.dot_product_attention "
        f"there"
    )
