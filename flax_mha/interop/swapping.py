"""Flax's attention layers in a model that somebody else wrote, replaced by ours.

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
from flax_mha.linen import MultiHeadAttention

Model = TypeVar("Model", bound=nn.Module | nnx.Module)

_THEIRS = inspect.unwrap(nn.MultiHeadDotProductAttention.__call__)
_SAME = (
    "num_heads", "dtype", "param_dtype", "qkv_features", "out_features", "broadcast_dropout",
    "dropout_rate", "deterministic", "precision", "kernel_init", "out_kernel_init", "bias_init",
    "out_bias_init", "use_bias", "decode", "normalize_qk", "force_fp32_for_softmax",
)  # fmt: skip
_SAME_NNX = (
    "num_heads", "in_features", "qkv_features", "out_features", "num_kv_heads", "in_kv_features",
    "dtype", "param_dtype", "broadcast_dropout", "dropout_rate", "deterministic", "precision",
    "decode", "normalize_qk", "use_bias",
)  # fmt: skip
# With them a layer computes its products in another way, such as quantized, which ours has not.
_PRODUCTS = (
    "qkv_dot_general", "out_dot_general", "qkv_dot_general_cls", "out_dot_general_cls",
    "qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls",
)  # fmt: skip
# How nnx promotes dtypes, which is a function of the user's there.
_PROMOTIONS = ("qkv_promote_dtype", "out_promote_dtype", "ln_promote_dtype")
_ARGUMENTS = inspect.signature(nnx.MultiHeadAttention.__init__).parameters


def swap(model: Model, **fields: Any) -> Model:
    """Return the model with Flax's multi-head attention computed by ours, wherever it stands.

    Neither its code nor its parameters change. Each `nn.MultiHeadDotProductAttention` (also as the
    base of `nn.SelfAttention` and of classes of one's own, whose code still runs) becomes a
    `flax_mha.MultiHeadAttention` with the same fields, and each `nnx.MultiHeadAttention`, but no
    class on top of it, one of `flax_mha.nnx`. What differs: dropout draws other weights; caches of
    decoding are ours, made by `init` (in nnx `init_cache`) as before.

    Args:
      model: of linen, or of nnx.
      **fields: more for each layer, such as `kernel="blockwise"`.

    Returns:
      Of linen a module with the same fields, which is an instance of the model's class; of nnx a
      model that shares the parameters with the one given.

    Raises:
      TypeError: if it is no model, or if a layer has products or promotions of its own
        (`qkv_dot_general`, `qkv_promote_dtype` and the like): in linen when it is first called, in
        nnx at once.
    """
    if isinstance(model, nnx.Module):
        return cast(Model, nnx.recursive_map(functools.partial(_replaced, fields), model))
    if isinstance(model, nn.Module):
        return _swapped(model, fields)
    raise TypeError(
        f"swap takes a module of linen or nnx, got {checks.describe(model)}; give Model()"
    )


def _swapped(model: Any, fields: dict[str, Any]) -> Any:
    """Return a copy of a class of its own, whose methods catch calls of Flax's layer."""
    cls = type(model)

    def catching(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def caught(*args: Any, **kwargs: Any) -> Any:
            with nn.intercept_methods(functools.partial(_ours, fields)):
                return method(*args, **kwargs)

        return caught

    public = [name for name in dir(cls) if name == "__call__" or not hasattr(nn.Module, name)]
    methods = [name for name in public if inspect.isfunction(inspect.getattr_static(cls, name))]
    # The last two for calls of what is no method of the model, such as apply(…, method=function).
    methods += ["apply", "init_with_output"]
    entries = {name: catching(getattr(cls, name)) for name in methods}
    subclass = type(cls.__name__, (cls,), entries | {"__module__": cls.__module__})
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    return subclass(**{name: getattr(model, name) for name in names if name != "parent"})


class _Standing(MultiHeadAttention):
    """Our layer in the scope of theirs, whose call is the one that Flax captures."""

    @nn.compact
    def stand_in(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer by a method of another name, so that no call is captured twice."""
        return cast(Any, MultiHeadAttention.__call__).__wrapped__(self, *args, **kwargs)


def _ours(fields: dict[str, Any], call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Call our layer in place of theirs, in its scope; all other methods as they are."""
    theirs = context.module
    if inspect.unwrap(context.orig_method.func) is not _THEIRS:
        return call(*args, **kwargs)
    same = {name: getattr(theirs, name) for name in _SAME} | _attention_fn(theirs, nn)
    return _Standing(**same | fields, parent=theirs.scope).stand_in(*args, **kwargs)


def _replaced(fields: dict[str, Any], path: Any, node: Any) -> Any:
    """Return our layer with their parameters, if the node is a layer of theirs."""
    if type(node) is not nnx.MultiHeadAttention:
        return node
    for name in _PROMOTIONS:
        if getattr(node, name) is not _ARGUMENTS[name].default:
            raise TypeError(f"swap can't replace a layer with {name}; keep Flax's layer there")
    same = {name: getattr(node, name) for name in _SAME_NNX} | _attention_fn(node, nnx)
    cls = flax_mha.nnx.MultiHeadAttention
    # Without parameters of its own: those of the other take their place.
    ours = nnx.eval_shape(lambda: cls(**same | fields, rngs=nnx.Rngs(0)))
    for name in ("query", "key", "value", "out"):
        linear = getattr(node, name)
        if type(linear) is nnx.LinearGeneral:
            mine = getattr(ours, name)
            mine.kernel, mine.bias = linear.kernel, linear.bias
        else:
            setattr(ours, name, linear)
    for name in ("query_ln", "key_ln", "rngs"):
        setattr(ours, name, getattr(node, name))
    return ours


def _attention_fn(layer: Any, library: Any) -> dict[str, Any]:
    """Return its function, unless that is Flax's own, whose place the kernels take."""
    for name in _PRODUCTS:
        if getattr(layer, name, None) is not None:
            raise TypeError(
                f"swap can't replace a layer with {name}, for ours has no products but einsum; "
                f"leave it out, or keep Flax's layer"
            )
    plain = layer.attention_fn is library.dot_product_attention
    return {} if plain else {"attention_fn": layer.attention_fn}
